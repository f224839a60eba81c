# SPDX-License-Identifier: MIT
# find_package(msa) gives msa::msa (shared) and msa::msa_static.
include(${CMAKE_CURRENT_LIST_DIR}/msaTargets.cmake)
