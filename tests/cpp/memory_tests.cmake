# Included by tests/cpp/CMakeLists.txt; needs the target shardsnap_core.
add_executable(memory_tests
  ${CMAKE_CURRENT_LIST_DIR}/main.cpp
  ${CMAKE_CURRENT_LIST_DIR}/test_arena.cpp
  ${CMAKE_CURRENT_LIST_DIR}/test_extent_allocator.cpp
  ${CMAKE_CURRENT_LIST_DIR}/test_memory_limits.cpp
  ${CMAKE_CURRENT_LIST_DIR}/test_numa.cpp)
target_compile_options(memory_tests PRIVATE -Wall -Wextra -Werror)
target_link_libraries(memory_tests PRIVATE shardsnap_core)
add_test(NAME memory COMMAND memory_tests)
set_tests_properties(memory PROPERTIES TIMEOUT 120)
