// gRPC's official cases.
#include <thread>
#include <vector>

#include "compressed.h"
#include "grpc/testing/test.grpc.pb.h"
#include "peer.h"

namespace {

using grpc::StatusCode;
using grpc::WriteOptions;
using namespace grpc::testing;

constexpr int kSizes[][2] = {{27182, 31415}, {8, 9}, {1828, 2653}, {45904, 58979}};
constexpr int kRequest = 271828, kReply = 314159;

auto Stub(const Target& target) { return TestService::NewStub(target.channel); }

void ZerosCame(const Payload& payload, int size) {
  Expect("zeros", payload.body() == std::string(size, '\0'), true);
}

SimpleRequest Large() {
  SimpleRequest request;
  request.set_response_size(kReply);
  request.mutable_payload()->set_body(std::string(kRequest, '\0'));
  return request;
}

StreamingOutputCallRequest Exchange(int size, int reply) {
  StreamingOutputCallRequest request;
  request.mutable_payload()->set_body(std::string(size, '\0'));
  request.add_response_parameters()->set_size(reply);
  return request;
}

void EmptyUnary(const Target& target) {
  Context context;
  Empty reply;
  Succeeded(Stub(target)->EmptyCall(&context, {}, &reply));
}

// No cache stands between: the calls have to succeed, with any content.
void CacheableUnary(const Target& target) {
  for (int n = 0; n < 2; ++n) {
    Context context;
    context.AddMetadata("x-user-ip", "1.2.3.4");
    SimpleResponse reply;
    Succeeded(Stub(target)->CacheableUnaryCall(&context, Large(), &reply));
  }
}

void LargeUnary(const Target& target) {
  Context context;
  SimpleResponse reply;
  Succeeded(Stub(target)->UnaryCall(&context, Large(), &reply));
  ZerosCame(reply.payload(), kReply);
}

grpc::Status Compressed(const Target& target, bool said, bool compressed) {
  Context context;
  context.set_compression_algorithm(compressed ? GRPC_COMPRESS_GZIP : GRPC_COMPRESS_NONE);
  SimpleRequest request = Large();
  request.mutable_expect_compressed()->set_value(said);
  SimpleResponse reply;
  return Stub(target)->UnaryCall(&context, request, &reply);
}

void ClientCompressedUnary(const Target& target) {
  Refused(Compressed(target, true, false), StatusCode::INVALID_ARGUMENT);
  Succeeded(Compressed(target, true, true));
  Succeeded(Compressed(target, false, false));
}

void ServerCompressedUnary(const Target& target) {
  for (bool compressed : {true, false}) {
    Context context;
    SimpleRequest request = Large();
    request.mutable_response_compressed()->set_value(compressed);
    SimpleResponse reply;
    Succeeded(Stub(target)->UnaryCall(&context, request, &reply));
    ZerosCame(reply.payload(), kReply);
    Expect("compressed", InteropClientContextInspector::WasCompressed(context), compressed);
  }
}

void ClientStreaming(const Target& target) {
  Context context;
  StreamingInputCallResponse reply;
  auto writer = Stub(target)->StreamingInputCall(&context, &reply);
  for (auto [size, _] : kSizes) {
    StreamingInputCallRequest request;
    request.mutable_payload()->set_body(std::string(size, '\0'));
    writer->Write(request);
  }
  writer->WritesDone();
  Succeeded(writer->Finish());
  Expect("bytes received", reply.aggregated_payload_size(), 74922);
}

void ClientCompressedStreaming(const Target& target) {
  StreamingInputCallRequest request;
  request.mutable_payload()->set_body(std::string(27182, '\0'));
  request.mutable_expect_compressed()->set_value(true);
  StreamingInputCallResponse reply;
  {
    // The probe: it says it is compressed, and is not.
    Context context;
    auto writer = Stub(target)->StreamingInputCall(&context, &reply);
    writer->Write(request, WriteOptions().set_no_compression());
    writer->WritesDone();
    Refused(writer->Finish(), StatusCode::INVALID_ARGUMENT);
  }
  Context context;
  context.set_compression_algorithm(GRPC_COMPRESS_GZIP);
  auto writer = Stub(target)->StreamingInputCall(&context, &reply);
  writer->Write(request);
  request.mutable_payload()->set_body(std::string(45904, '\0'));
  request.mutable_expect_compressed()->set_value(false);
  writer->Write(request, WriteOptions().set_no_compression());
  writer->WritesDone();
  Succeeded(writer->Finish());
  Expect("bytes received", reply.aggregated_payload_size(), 73086);
}

void ServerStreaming(const Target& target) {
  Context context;
  StreamingOutputCallRequest request;
  for (auto [_, size] : kSizes) request.add_response_parameters()->set_size(size);
  auto reader = Stub(target)->StreamingOutputCall(&context, request);
  StreamingOutputCallResponse reply;
  for (auto [_, size] : kSizes) {
    Expect("another reply", reader->Read(&reply), true);
    ZerosCame(reply.payload(), size);
  }
  Expect("another reply", reader->Read(&reply), false);
  Succeeded(reader->Finish());
}

void ServerCompressedStreaming(const Target& target) {
  Context context;
  StreamingOutputCallRequest request;
  for (auto [compressed, size] : {std::pair(true, 31415), std::pair(false, 92653)}) {
    auto* asked = request.add_response_parameters();
    asked->mutable_compressed()->set_value(compressed);
    asked->set_size(size);
  }
  auto reader = Stub(target)->StreamingOutputCall(&context, request);
  StreamingOutputCallResponse reply;
  for (auto& asked : request.response_parameters()) {
    Expect("another reply", reader->Read(&reply), true);
    ZerosCame(reply.payload(), asked.size());
    Expect("compressed", InteropClientContextInspector::WasCompressed(context), asked.compressed().value());
  }
  Expect("another reply", reader->Read(&reply), false);
  Succeeded(reader->Finish());
}

void PingPong(const Target& target) {
  Context context;
  auto stream = Stub(target)->FullDuplexCall(&context);
  StreamingOutputCallResponse reply;
  for (auto [size, answer] : kSizes) {
    stream->Write(Exchange(size, answer));
    Expect("another reply", stream->Read(&reply), true);
    ZerosCame(reply.payload(), answer);
  }
  stream->WritesDone();
  Expect("another reply", stream->Read(&reply), false);
  Succeeded(stream->Finish());
}

void EmptyStream(const Target& target) {
  Context context;
  auto stream = Stub(target)->FullDuplexCall(&context);
  stream->WritesDone();
  StreamingOutputCallResponse reply;
  Expect("another reply", stream->Read(&reply), false);
  Succeeded(stream->Finish());
}

void CustomMetadata(const Target& target) {
  EchoesMetadata(target, "test_initial_metadata_value", "\xab\xab\xab");
}

void EchoesStatus(const Target& target, const std::string& message) {
  EchoStatus status;
  status.set_code(StatusCode::UNKNOWN);
  status.set_message(message);
  Context context;
  SimpleRequest request;
  *request.mutable_response_status() = status;
  SimpleResponse reply;
  auto got = Stub(target)->UnaryCall(&context, request, &reply);
  Refused(got, StatusCode::UNKNOWN);
  Expect("message", got.error_message(), message);
  Context second;
  auto stream = Stub(target)->FullDuplexCall(&second);
  StreamingOutputCallRequest streamed;
  *streamed.mutable_response_status() = status;
  stream->Write(streamed);
  StreamingOutputCallResponse none;
  Expect("a reply", stream->Read(&none), false);
  got = stream->Finish();
  Refused(got, StatusCode::UNKNOWN);
  Expect("message", got.error_message(), message);
}

void StatusCodeAndMessage(const Target& target) { EchoesStatus(target, "test status message"); }

void SpecialStatusMessage(const Target& target) {
  EchoesStatus(target, "\t\ntest with whitespace\r\nand Unicode BMP ☺ and non-BMP 😈\t\n");
}

void UnimplementedMethod(const Target& target) {
  Context context;
  Empty reply;
  Refused(Stub(target)->UnimplementedCall(&context, {}, &reply), StatusCode::UNIMPLEMENTED);
}

void UnimplementedServiceCall(const Target& target) {
  Context context;
  Empty reply;
  auto stub = UnimplementedService::NewStub(target.channel);
  Refused(stub->UnimplementedCall(&context, {}, &reply), StatusCode::UNIMPLEMENTED);
}

void CancelAfterBegin(const Target& target) {
  Context context;
  StreamingInputCallResponse reply;
  auto writer = Stub(target)->StreamingInputCall(&context, &reply);
  context.TryCancel();
  Refused(writer->Finish(), StatusCode::CANCELLED);
}

void CancelAfterFirstResponse(const Target& target) {
  Context context;
  auto stream = Stub(target)->FullDuplexCall(&context);
  stream->Write(Exchange(27182, 31415));
  StreamingOutputCallResponse reply;
  Expect("a reply", stream->Read(&reply), true);
  ZerosCame(reply.payload(), 31415);
  context.TryCancel();
  Refused(stream->Finish(), StatusCode::CANCELLED);
}

void TimeoutOnSleepingServer(const Target& target) {
  Context context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(1));
  auto stream = Stub(target)->FullDuplexCall(&context);
  StreamingOutputCallRequest request;
  request.mutable_payload()->set_body(std::string(27182, '\0'));
  stream->Write(request);
  StreamingOutputCallResponse reply;
  Expect("a reply", stream->Read(&reply), false);
  Refused(stream->Finish(), StatusCode::DEADLINE_EXCEEDED);
}

// So many threads at once, the first error of any.
void AtOnce(int count, const std::function<void()>& body) {
  std::vector<std::string> errors(count);
  std::vector<std::thread> threads;
  for (auto& error : errors) {
    threads.emplace_back([&body, &error] {
      try {
        body();
      } catch (const std::exception& caught) {
        error = caught.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (auto& error : errors) {
    if (!error.empty()) throw std::runtime_error(error);
  }
}

void ConcurrentLargeUnary(const Target& target) {
  AtOnce(100, [&] { LargeUnary(target); });
}

void RpcSoak(const Target& target) {
  AtOnce(4, [&] {
    for (int n = 0; n < 25; ++n) LargeUnary(target);
  });
}

void ChannelSoak(const Target& target) {
  AtOnce(4, [&] {
    for (int n = 0; n < 25; ++n) LargeUnary(target.Connect());
  });
}

template <typename Pairs>
bool Has(const Pairs& pairs, const std::string& key, const std::string& value) {
  auto found = pairs.find(key);
  return found != pairs.end() && found->second == value;
}

void CameBack(const grpc::ClientContext& context, const std::string& initial, const std::string& trailing) {
  Expect("initial metadata came back", Has(context.GetServerInitialMetadata(), "x-grpc-test-echo-initial", initial), true);
  Expect("trailing metadata came back", Has(context.GetServerTrailingMetadata(), "x-grpc-test-echo-trailing-bin", trailing),
         true);
}

}  // namespace

void EchoesMetadata(const Target& target, const std::string& initial, const std::string& trailing) {
  for (bool streamed : {false, true}) {
    Context context;
    context.AddMetadata("x-grpc-test-echo-initial", initial);
    context.AddMetadata("x-grpc-test-echo-trailing-bin", trailing);
    if (streamed) {
      auto stream = Stub(target)->FullDuplexCall(&context);
      stream->Write(Exchange(1, 1));
      stream->WritesDone();
      StreamingOutputCallResponse reply;
      while (stream->Read(&reply)) continue;
      Succeeded(stream->Finish());
    } else {
      SimpleResponse reply;
      Succeeded(Stub(target)->UnaryCall(&context, Large(), &reply));
    }
    CameBack(context, initial, trailing);
  }
}

Cases OfficialCases() {
  return {
      {"empty_unary", EmptyUnary},
      {"cacheable_unary", CacheableUnary},
      {"large_unary", LargeUnary},
      {"client_compressed_unary", ClientCompressedUnary},
      {"server_compressed_unary", ServerCompressedUnary},
      {"client_streaming", ClientStreaming},
      {"client_compressed_streaming", ClientCompressedStreaming},
      {"server_streaming", ServerStreaming},
      {"server_compressed_streaming", ServerCompressedStreaming},
      {"ping_pong", PingPong},
      {"empty_stream", EmptyStream},
      {"custom_metadata", CustomMetadata},
      {"status_code_and_message", StatusCodeAndMessage},
      {"special_status_message", SpecialStatusMessage},
      {"unimplemented_method", UnimplementedMethod},
      {"unimplemented_service", UnimplementedServiceCall},
      {"cancel_after_begin", CancelAfterBegin},
      {"cancel_after_first_response", CancelAfterFirstResponse},
      {"timeout_on_sleeping_server", TimeoutOnSleepingServer},
      {"concurrent_large_unary", ConcurrentLargeUnary},
      {"rpc_soak", RpcSoak},
      {"channel_soak", ChannelSoak},
  };
}
