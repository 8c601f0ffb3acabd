// Whether a message came compressed. The library's own interop programs see it through these classes, which its headers
// name as friends; applications don't.
#pragma once

#include <grpcpp/grpcpp.h>

uint32_t grpc_call_test_only_get_message_flags(grpc_call* call);

namespace grpc::testing {

// GRPC_WRITE_INTERNAL_COMPRESS, or that the library decompressed it (GRPC_WRITE_INTERNAL_TEST_ONLY_WAS_COMPRESSED).
constexpr uint32_t kCompressed = 0x80000000u | 0x40000000u;

class InteropServerContextInspector {
 public:
  static bool WasCompressed(ServerContextBase& context) {
    return grpc_call_test_only_get_message_flags(context.c_call()) & kCompressed;
  }
};

class InteropClientContextInspector {
 public:
  static bool WasCompressed(ClientContext& context) {
    return grpc_call_test_only_get_message_flags(context.c_call()) & kCompressed;
  }
};

}  // namespace grpc::testing
