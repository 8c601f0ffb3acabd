// gRPC's test service and the checked calls, served by C++.
#include <chrono>
#include <iostream>
#include <thread>
#include <vector>

#include "checked.grpc.pb.h"
#include "compressed.h"
#include "content.h"
#include "grpc/testing/test.grpc.pb.h"
#include "peer.h"

namespace {

using grpc::ServerContext;
using grpc::ServerReader;
using grpc::ServerReaderWriter;
using grpc::ServerWriter;
using grpc::Status;
using grpc::StatusCode;
using grpc::WriteOptions;
using namespace grpc::testing;
using namespace tonic_rdma::interop::v1;

constexpr char kEchoInitial[] = "x-grpc-test-echo-initial";
constexpr char kEchoTrailing[] = "x-grpc-test-echo-trailing-bin";

std::string Text(grpc::string_ref text) { return {text.data(), text.size()}; }

void EchoMetadata(ServerContext* context) {
  auto& sent = context->client_metadata();
  if (auto found = sent.find(kEchoInitial); found != sent.end()) {
    context->AddInitialMetadata(kEchoInitial, Text(found->second));
  }
  if (auto found = sent.find(kEchoTrailing); found != sent.end()) {
    context->AddTrailingMetadata(kEchoTrailing, Text(found->second));
  }
}

Status Fill(int32_t size, Payload* payload) {
  if (size < 0 || size > kLargest) {
    return {StatusCode::INVALID_ARGUMENT, "a payload of " + std::to_string(size) + " bytes was asked for"};
  }
  payload->set_body(std::string(size, '\0'));
  return Status::OK;
}

// Whether the request came as its sender says it did.
template <typename Request>
Status AsExpected(ServerContext* context, const Request& request) {
  if (!request.has_expect_compressed()) return Status::OK;
  bool compressed = InteropServerContextInspector::WasCompressed(*context);
  if (request.expect_compressed().value() == compressed) return Status::OK;
  return {StatusCode::INVALID_ARGUMENT, compressed ? "the request came compressed" : "the request came as it is"};
}

Status EchoedStatus(const EchoStatus& asked) { return {static_cast<StatusCode>(asked.code()), asked.message()}; }

class Test final : public TestService::Service {
  Status EmptyCall(ServerContext*, const Empty*, Empty*) override { return Status::OK; }

  Status UnaryCall(ServerContext* context, const SimpleRequest* request, SimpleResponse* reply) override {
    EchoMetadata(context);
    if (Status status = AsExpected(context, *request); !status.ok()) return status;
    if (request->has_response_status()) return EchoedStatus(request->response_status());
    bool compressed = request->response_compressed().value();
    context->set_compression_algorithm(compressed ? GRPC_COMPRESS_GZIP : GRPC_COMPRESS_NONE);
    return Fill(request->response_size(), reply->mutable_payload());
  }

  // As the official servers: the time, so that an answer from a cache shows.
  Status CacheableUnaryCall(ServerContext* context, const SimpleRequest*, SimpleResponse* reply) override {
    context->AddInitialMetadata("cache-control", "max-age=60, public");
    auto now = std::chrono::steady_clock::now().time_since_epoch().count();
    reply->mutable_payload()->set_body(std::to_string(now));
    return Status::OK;
  }

  Status StreamingOutputCall(ServerContext* context, const StreamingOutputCallRequest* request,
                             ServerWriter<StreamingOutputCallResponse>* writer) override {
    for (auto& asked : request->response_parameters()) {
      if (asked.compressed().value()) context->set_compression_algorithm(GRPC_COMPRESS_GZIP);
    }
    return Reply(*request, writer);
  }

  Status StreamingInputCall(ServerContext* context, ServerReader<StreamingInputCallRequest>* reader,
                            StreamingInputCallResponse* reply) override {
    StreamingInputCallRequest request;
    int32_t total = 0;
    while (reader->Read(&request)) {
      if (Status status = AsExpected(context, request); !status.ok()) return status;
      total += request.payload().body().size();
    }
    reply->set_aggregated_payload_size(total);
    return Status::OK;
  }

  Status FullDuplexCall(ServerContext* context,
                        ServerReaderWriter<StreamingOutputCallResponse, StreamingOutputCallRequest>* stream) override {
    EchoMetadata(context);
    StreamingOutputCallRequest request;
    while (stream->Read(&request)) {
      if (request.has_response_status()) return EchoedStatus(request.response_status());
      if (Status status = Reply(request, stream); !status.ok()) return status;
    }
    return Status::OK;
  }

  Status HalfDuplexCall(ServerContext*,
                        ServerReaderWriter<StreamingOutputCallResponse, StreamingOutputCallRequest>* stream) override {
    std::vector<StreamingOutputCallRequest> requests(1);
    while (stream->Read(&requests.back())) requests.emplace_back();
    requests.pop_back();
    for (auto& request : requests) {
      if (Status status = Reply(request, stream); !status.ok()) return status;
    }
    return Status::OK;
  }

  template <typename Writer>
  static Status Reply(const StreamingOutputCallRequest& request, Writer* writer) {
    for (auto& asked : request.response_parameters()) {
      auto interval = std::clamp(asked.interval_us(), 0, 60'000'000);
      std::this_thread::sleep_for(std::chrono::microseconds(interval));
      StreamingOutputCallResponse reply;
      if (Status status = Fill(asked.size(), reply.mutable_payload()); !status.ok()) return status;
      WriteOptions options;
      if (!asked.compressed().value()) options.set_no_compression();
      if (!writer->Write(reply, options)) break;
    }
    return Status::OK;
  }
};

class CheckedCalls final : public Checked::Service {
  Status Unary(ServerContext* context, const CheckedRequest* request, CheckedReply* reply) override {
    CompressWhatCompresses(context, *request);
    return Reply(*request, 0, reply);
  }

  Status Collect(ServerContext*, ServerReader<CheckedRequest>* reader, CheckedReply* total) override {
    CheckedRequest request;
    while (reader->Read(&request)) {
      CheckedReply next;
      if (Status status = Reply(request, 0, &next); !status.ok()) return status;
      next.set_received_bytes(next.received_bytes() + total->received_bytes());
      if (total->first_mismatch()) next.set_first_mismatch(total->first_mismatch());
      *total = next;
    }
    return Status::OK;
  }

  Status Produce(ServerContext* context, const CheckedRequest* request, ServerWriter<CheckedReply>* writer) override {
    CompressWhatCompresses(context, *request);
    for (uint32_t number = 0; number < request->count(); ++number) {
      CheckedReply reply;
      if (Status status = Reply(*request, number, &reply); !status.ok()) return status;
      if (!writer->Write(reply)) break;
    }
    return Status::OK;
  }

  Status Exchange(ServerContext* context, ServerReaderWriter<CheckedReply, CheckedRequest>* stream) override {
    CheckedRequest request;
    CheckedReply reply;
    for (int number = 0; stream->Read(&request); ++number) {
      if (number == 0) CompressWhatCompresses(context, request);
      if (Status status = Reply(request, 0, &reply); !status.ok()) return status;
      if (!stream->Write(reply)) break;
    }
    return Status::OK;
  }

  Status Fail(ServerContext* context, const FailRequest* request, CheckedReply*) override {
    context->AddTrailingMetadata("x-checked-bin", request->details());
    return {static_cast<StatusCode>(request->code()), request->message(), request->details()};
  }

  // What has a period does. All replies of the call go out compressed.
  static void CompressWhatCompresses(ServerContext* context, const CheckedRequest& request) {
    if (request.period()) context->set_compression_algorithm(GRPC_COMPRESS_GZIP);
  }

  static Status Reply(const CheckedRequest& request, uint32_t number, CheckedReply* reply) {
    if (request.reply_bytes() > kLargest) {
      return {StatusCode::INVALID_ARGUMENT, std::to_string(request.reply_bytes()) + " bytes were asked for"};
    }
    uint32_t seed = request.reply_seed() + number;
    reply->set_seed(seed);
    reply->set_payload(Content(seed, request.reply_bytes(), request.period()));
    reply->set_received_bytes(request.payload().size());
    reply->set_first_mismatch(FirstMismatch(request.seed(), request.payload(), request.period()));
    return Status::OK;
  }
};

}  // namespace

int Serve(int port, const std::shared_ptr<grpc::ServerCredentials>& credentials) {
  Test test;
  CheckedCalls checked;
  grpc::ServerBuilder builder;
  int bound = 0;
  builder.AddListeningPort("127.0.0.1:" + std::to_string(port), credentials, &bound);
  builder.SetMaxReceiveMessageSize(kLargest).SetMaxSendMessageSize(kLargest);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.RegisterService(&test).RegisterService(&checked);
  auto server = builder.BuildAndStart();
  if (!server || !bound) {
    std::cerr << "peer: can't listen on port " << port << ", or not with this certificate and key" << std::endl;
    return 2;
  }
  std::cout << bound << std::endl;
  server->Wait();
  return 0;
}
