# SPDX-License-Identifier: MIT
# Reads the log of a ctest run and prints every skip, then "PASSED FAILED SKIPPED". What a test counts itself (cmocka's
# summary, or "N passed, N failed, N skipped") is added up; one that counts nothing is one test. A test that ends badly after
# a clean count (a sanitizer's report, a leak) has one failure.

/^[0-9]+\/[0-9]+ Testing: / { name = $3; here_passed = here_failed = here_skipped = 0; started = 1 }
/^Command: ""$/ { here_failed++ } # the program is missing; ctest's log calls that passed
/^\[  PASSED  \] [0-9]+ test\(s\)/ { here_passed += $4 }
/^\[  FAILED  \] [0-9]+ test\(s\)/ { here_failed += $4 }
/^\[  SKIPPED \] [0-9]+ test\(s\)/ { here_skipped += $4 }
/^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$/ { here_passed += $1; here_failed += $3; here_skipped += $5 }
/^skip: / || /: skipped \(/ || (/^\[  SKIPPED \] / && $5 !~ /^test/) { print "  skipped in " name ": " $0 }
/^Test (Passed|Failed)\.$/ && started {
    if ($2 == "Failed." && !here_failed)
        here_failed = 1
    if (!(here_passed + here_failed + here_skipped))
        here_passed = 1
    passed += here_passed; failed += here_failed; skipped += here_skipped; started = 0
}
END { print passed + 0, failed + 0 + started, skipped + 0 }
