// The content of checked payloads (interop/proto/checked.proto).
#pragma once

#include <cstdint>
#include <string>

inline std::string Content(uint32_t seed, size_t length, uint32_t period = 0) {
  std::string bytes;
  bytes.reserve(length + 4);
  for (size_t word = 0; bytes.size() < length; ++word) {
    uint32_t k = period ? word % period : word;
    uint32_t value = k * 2654435761u + seed;
    for (int shift = 0; shift < 32; shift += 8) bytes.push_back(static_cast<char>(value >> shift));
  }
  bytes.resize(length);
  return bytes;
}

// Offset of the first wrong byte, plus one; 0 if all are right.
inline uint64_t FirstMismatch(uint32_t seed, const std::string& payload, uint32_t period = 0) {
  std::string expected = Content(seed, payload.size(), period);
  for (size_t at = 0; at < payload.size(); ++at) {
    if (payload[at] != expected[at]) return at + 1;
  }
  return 0;
}
