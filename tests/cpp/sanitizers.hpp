// Which sanitizers the tests run under; both compilers say it in their own way.
#pragma once

#if defined(__has_feature)
#define SHARDSNAP_HAS_FEATURE(feature) __has_feature(feature)
#else
#define SHARDSNAP_HAS_FEATURE(feature) 0
#endif

#if defined(__SANITIZE_ADDRESS__) || SHARDSNAP_HAS_FEATURE(address_sanitizer)
constexpr bool kAddressSanitizer = true;
#else
constexpr bool kAddressSanitizer = false;
#endif

#if defined(__SANITIZE_THREAD__) || SHARDSNAP_HAS_FEATURE(thread_sanitizer)
constexpr bool kThreadSanitizer = true;
#else
constexpr bool kThreadSanitizer = false;
#endif
