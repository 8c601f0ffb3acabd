// The cases whose payloads are checked byte for byte by both ends (interop/proto/checked.proto).
#include <iterator>
#include <thread>
#include <vector>

#include "checked.grpc.pb.h"
#include "content.h"
#include "peer.h"

namespace {

using grpc::StatusCode;
using namespace tonic_rdma::interop::v1;

constexpr uint32_t kSizes[] = {0, 1, 1000, 20'000, 1 << 20, 8 << 20};
constexpr uint32_t kCount = std::size(kSizes);

auto Stub(const Target& target) { return Checked::NewStub(target.channel); }

CheckedRequest Asked(uint32_t seed, uint32_t length, uint32_t reply = 0, uint32_t period = 0) {
  CheckedRequest request;
  request.set_seed(seed);
  request.set_payload(Content(seed, length, period));
  request.set_reply_seed(seed + 1000);
  request.set_reply_bytes(reply);
  request.set_period(period);
  return request;
}

void Right(const CheckedReply& reply, uint32_t seed, uint32_t length, uint32_t received, uint32_t period = 0) {
  Expect("seed", reply.seed(), seed);
  Expect("reply's bytes", reply.payload().size(), length);
  Expect("first wrong byte, from 1", FirstMismatch(seed, reply.payload(), period), 0);
  Expect("bytes the server received", reply.received_bytes(), received);
  Expect("first wrong byte the server received, from 1", reply.first_mismatch(), 0);
}

void BothWays(const Target& target, uint32_t seed, uint32_t length, uint32_t reply, uint32_t period = 0) {
  Context context;
  if (period) context.set_compression_algorithm(GRPC_COMPRESS_GZIP);
  CheckedReply got;
  Succeeded(Stub(target)->Unary(&context, Asked(seed, length, reply, period), &got));
  Right(got, seed + 1000, reply, length, period);
}

void Unary(const Target& target) {
  for (uint32_t seed = 0; seed < kCount; ++seed) BothWays(target, seed, kSizes[seed], kSizes[seed]);
  // The server's own check: the last of 100 bytes is wrong.
  CheckedRequest spoiled = Asked(1, 100);
  spoiled.mutable_payload()->back() ^= 1;
  Context context;
  CheckedReply reply;
  Succeeded(Stub(target)->Unary(&context, spoiled, &reply));
  Expect("what the server says is wrong", reply.first_mismatch(), 100);
}

void ClientStreaming(const Target& target) {
  Context context;
  CheckedReply reply;
  auto writer = Stub(target)->Collect(&context, &reply);
  uint64_t total = 0;
  for (uint32_t seed = 0; seed < kCount; ++seed) {
    writer->Write(Asked(seed, kSizes[seed]));
    total += kSizes[seed];
  }
  writer->WritesDone();
  Succeeded(writer->Finish());
  Expect("bytes the server received", reply.received_bytes(), total);
  Expect("first wrong byte the server received, from 1", reply.first_mismatch(), 0);
}

void ServerStreaming(const Target& target) {
  Context context;
  CheckedRequest request = Asked(5, 10, 100'000);
  request.set_count(50);
  auto reader = Stub(target)->Produce(&context, request);
  CheckedReply reply;
  for (uint32_t number = 0; number < request.count(); ++number) {
    Expect("another reply", reader->Read(&reply), true);
    Right(reply, 1005 + number, 100'000, 10);
  }
  Expect("another reply", reader->Read(&reply), false);
  Succeeded(reader->Finish());
}

void PingPong(const Target& target) {
  Context context;
  auto stream = Stub(target)->Exchange(&context);
  CheckedReply reply;
  for (uint32_t seed = 0; seed < kCount; ++seed) {
    uint32_t answer = kSizes[kCount - 1 - seed];
    stream->Write(Asked(seed, kSizes[seed], answer));
    Expect("another reply", stream->Read(&reply), true);
    Right(reply, seed + 1000, answer, kSizes[seed]);
  }
  stream->WritesDone();
  Expect("another reply", stream->Read(&reply), false);
  Succeeded(stream->Finish());
}

// The client's half ends at once, and the server goes on.
void HalfClose(const Target& target) {
  Context context;
  auto stream = Stub(target)->Exchange(&context);
  for (uint32_t seed = 0; seed < 20; ++seed) stream->Write(Asked(seed, 1000, 300'000));
  stream->WritesDone();
  CheckedReply reply;
  for (uint32_t seed = 0; seed < 20; ++seed) {
    Expect("another reply", stream->Read(&reply), true);
    Right(reply, seed + 1000, 300'000, 1000);
  }
  Expect("another reply", stream->Read(&reply), false);
  Succeeded(stream->Finish());
}

void Concurrent(const Target& target) {
  std::vector<std::string> errors(64);
  std::vector<std::thread> threads;
  for (uint32_t seed = 0; seed < errors.size(); ++seed) {
    threads.emplace_back([&, seed] {
      try {
        BothWays(target, seed, 1000 * seed, 2000 * seed);
      } catch (const std::exception& caught) {
        errors[seed] = caught.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (auto& error : errors) Expect("error", error, "");
}

void Gzip(const Target& target) {
  for (uint32_t seed = 0; seed < kCount; ++seed) BothWays(target, seed, kSizes[seed], kSizes[seed], 100);
}

void BinaryMetadata(const Target& target) {
  std::string every;
  for (int at = 0; at < 512; ++at) every.push_back(static_cast<char>(at));
  EchoesMetadata(target, "a  b ~!", every);
}

void LargeMetadata(const Target& target) {
  std::string text;
  for (int n = 0; n < 180; ++n) text += "0123456789abcdef";
  EchoesMetadata(target, text, Content(9, 2000));
}

void StatusDetails(const Target& target) {
  const std::string message = "not found: Größe ☺";
  // google.rpc.Status: code, message, and a detail of a type that nobody knows.
  std::string details = "\x08\x05\x12" + std::string(1, message.size()) + message;
  details += std::string("\x1a\x06\x0a\x01t\x12\x01\xff", 8);
  FailRequest request;
  request.set_code(StatusCode::NOT_FOUND);
  request.set_message(message);
  request.set_details(details);
  Context context;
  CheckedReply reply;
  auto status = Stub(target)->Fail(&context, request, &reply);
  Refused(status, StatusCode::NOT_FOUND);
  Expect("message", status.error_message(), message);
  Expect("grpc-status-details-bin came", status.error_details() == details, true);
  auto& trailers = context.GetServerTrailingMetadata();
  auto found = trailers.find("x-checked-bin");
  Expect("x-checked-bin came", found != trailers.end() && found->second == details, true);
}

}  // namespace

Cases CheckedCases() {
  return {
      {"checked_unary", Unary},
      {"checked_client_streaming", ClientStreaming},
      {"checked_server_streaming", ServerStreaming},
      {"checked_ping_pong", PingPong},
      {"checked_half_close", HalfClose},
      {"checked_concurrent", Concurrent},
      {"checked_gzip", Gzip},
      {"checked_binary_metadata", BinaryMetadata},
      {"checked_large_metadata", LargeMetadata},
      {"checked_status_details", StatusDetails},
  };
}
