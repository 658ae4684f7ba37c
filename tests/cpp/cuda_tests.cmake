# The CUDA device against the emulated driver, and our declarations against a CUDA toolkit where there is one.
add_executable(test_cuda_device main.cpp test_cuda_device.cpp)
target_link_libraries(test_cuda_device PRIVATE shardsnap_core)
target_compile_options(test_cuda_device PRIVATE -Wall -Wextra -Werror)
target_compile_definitions(test_cuda_device PRIVATE SHARDSNAP_EMULATOR_PATH="$<TARGET_FILE:shardsnap_emulated_cuda>")
add_dependencies(test_cuda_device shardsnap_emulated_cuda)

# One process a version: the driver is loaded once.
foreach(driver_version 12000 12080 13000)
  add_test(NAME cuda_device_driver_${driver_version} COMMAND test_cuda_device "--test-suite=cuda device")
  set_tests_properties(cuda_device_driver_${driver_version} PROPERTIES
    ENVIRONMENT SHARDSNAP_EMULATOR_DRIVER_VERSION=${driver_version} TIMEOUT 120)
endforeach()
add_test(NAME cuda_device_unavailable COMMAND test_cuda_device "--test-suite=cuda unavailable")
add_test(NAME cuda_device_placement COMMAND test_cuda_device "--test-suite=cuda placement")
add_test(NAME cuda_device_driver_too_old COMMAND test_cuda_device "--test-suite=cuda driver too old")
set_tests_properties(cuda_device_driver_too_old PROPERTIES ENVIRONMENT SHARDSNAP_EMULATOR_DRIVER_VERSION=10000)
set_tests_properties(cuda_device_driver_too_old cuda_device_unavailable cuda_device_placement PROPERTIES TIMEOUT 60)

find_path(SHARDSNAP_CUDA_INCLUDE cudaTypedefs.h
  HINTS ENV CUDA_HOME ENV CUDA_PATH /usr/local/cuda PATH_SUFFIXES include)
if(SHARDSNAP_CUDA_INCLUDE)
  add_executable(test_cuda_abi main.cpp test_cuda_abi.cpp)
  target_include_directories(test_cuda_abi PRIVATE ${PROJECT_SOURCE_DIR}/csrc)
  target_include_directories(test_cuda_abi SYSTEM PRIVATE ${SHARDSNAP_CUDA_INCLUDE})
  target_compile_options(test_cuda_abi PRIVATE -Wall -Wextra -Werror)
  add_test(NAME cuda_abi COMMAND test_cuda_abi)
else()
  message(STATUS "No CUDA toolkit headers: the driver declarations are not checked against them")
endif()
