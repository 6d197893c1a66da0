# The CUDA library: custom calls on NVIDIA GPUs, a plain shared library that ctypes loads,
# also where there is no driver. It contains the CUDA runtime.

set(DAFJAX_CUDA AUTO CACHE STRING "Build the CUDA library: AUTO (if nvcc works), ON, OFF")
set_property(CACHE DAFJAX_CUDA PROPERTY STRINGS AUTO ON OFF)
set(DAFJAX_CUDA_ARCHITECTURES "" CACHE STRING
  "Architectures in CMake's notation, instead of all that the compiler and dafjax know")
if(NOT DAFJAX_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "DAFJAX_CUDA is \"${DAFJAX_CUDA}\", but must be AUTO, ON or OFF.")
endif()
set(DAFJAX_HAS_CUDA OFF)
if(DAFJAX_CUDA STREQUAL "OFF")
  return()
endif()

# Not the architecture that CMake would guess: ours are set for the target.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES OFF)
endif()
if(NOT DEFINED CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  find_program(DAFJAX_NVCC nvcc PATHS /usr/local/cuda/bin)
  if(DAFJAX_NVCC)
    set(CMAKE_CUDA_COMPILER ${DAFJAX_NVCC})
  endif()
endif()
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  string(CONCAT remedy
    "Install the CUDA toolkit (JetPack has it; elsewhere see "
    "https://developer.nvidia.com/cuda-downloads) and put nvcc on the PATH, or set the "
    "environment variable CUDACXX to it.")
  if(DAFJAX_CUDA STREQUAL "ON")
    message(FATAL_ERROR
      "DAFJAX_CUDA is ON, but no CUDA compiler that works was found. ${remedy}")
  endif()
  message(STATUS "dafjax is built without CUDA: no nvcc that works. ${remedy}")
  return()
endif()
enable_language(CUDA)
set(DAFJAX_HAS_CUDA ON)

# A library of CUDA 13 runs with drivers of CUDA 13, one of CUDA 12 with both: on JetPack 6
# it is built with that system's nvcc. Orin is 87 and Thor 110 (101 before CUDA 13). The
# code of 80 and 120 that drivers translate serves all that is not there.
if(DAFJAX_CUDA_ARCHITECTURES)
  set(architectures ${DAFJAX_CUDA_ARCHITECTURES})
elseif(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13.0)
  set(architectures
    75-real 80-real 86-real 87-real 89-real 90-real 100-real 110-real 120-real
    80-virtual 120-virtual)
elseif(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
  set(architectures
    72-real 75-real 80-real 86-real 87-real 89-real 90-real 100-real 101-real 120-real
    80-virtual 120-virtual)
else()
  set(architectures
    72-real 75-real 80-real 86-real 87-real 89-real 90-real 80-virtual 90-virtual)
endif()
message(STATUS "dafjax is built with CUDA ${CMAKE_CUDA_COMPILER_VERSION} for "
  "${architectures}")

add_library(dafjax_cuda MODULE
  cuda/bitmask.cu cuda/notes.cu cuda/pack_affine.cu cuda/pack_entry.cu cuda/reduce.cu
  cuda/unpack_affine.cu cuda/unpack_entry.cu cuda/update_table.cu
  ffi/cuda_affine.cc ffi/cuda_bitmask.cc ffi/cuda_facts.cc ffi/cuda_ledger.cc
  ffi/cuda_pool.cc ffi/cuda_reduce.cc ffi/cuda_tie.cc)
# What only the host runs: nvcc compiles it once, not for every architecture.
add_library(dafjax_cuda_host OBJECT
  cuda/copy.cu cuda/graph.cu
  device_pool/device_pool.cu device_pool/entry_packer.cu device_pool/host_packer.cu
  device_pool/mapped_memory.cu device_pool/note_queue.cu device_pool/page_lists.cu
  device_pool/told_entries.cu ledger/device_notes.cu)
target_link_libraries(dafjax_cuda PRIVATE dafjax_checks dafjax_cuda_host)
list(GET architectures 0 first_architecture)
set_target_properties(dafjax_cuda PROPERTIES CUDA_ARCHITECTURES "${architectures}")
set_target_properties(dafjax_cuda_host PROPERTIES
  CUDA_ARCHITECTURES "${first_architecture}")
string(REPLACE ";" " " architectures_text "${architectures}")
set_source_files_properties(ffi/cuda_facts.cc PROPERTIES
  COMPILE_DEFINITIONS "DAFJAX_CUDA_ARCHITECTURES=\"${architectures_text}\"")
# Kernels keep all they have in registers. Other compilers than ours may not manage.
if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13.0)
  set(no_local_memory
    -Xptxas=--warn-on-local-memory-usage,--warn-on-spills,--warning-as-error)
endif()
foreach(target dafjax_cuda dafjax_cuda_host)
  set_target_properties(${target} PROPERTIES
    CUDA_RUNTIME_LIBRARY Static
    CUDA_STANDARD 17
    CUDA_STANDARD_REQUIRED ON
    CUDA_VISIBILITY_PRESET hidden)
  target_include_directories(${target} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
  target_include_directories(${target} SYSTEM PRIVATE
    ${jaxlib_dir}/include ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  # Subnormals count as zero and every operation rounds once, as on the CPU.
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX>:${warnings}>
    $<$<COMPILE_LANGUAGE:CUDA>:-ftz=true -fmad=false --expt-relaxed-constexpr
    -Xfatbin=-compress-all ${no_local_memory}>)
endforeach()
target_precompile_headers(dafjax_cuda PRIVATE
  "$<$<COMPILE_LANGUAGE:CXX>:xla/ffi/api/ffi.h>")
target_link_options(dafjax_cuda PRIVATE -Wl,--exclude-libs,ALL)
install(TARGETS dafjax_cuda LIBRARY DESTINATION dafjax/_native)
