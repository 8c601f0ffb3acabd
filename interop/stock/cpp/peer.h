// What the peer's parts share.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>

#include <grpcpp/grpcpp.h>

#include "tls.h"

constexpr int kLargest = 64 << 20;
constexpr std::chrono::seconds kLimit{30};

// Serves until killed; returns if it can't.
int Serve(int port, const std::shared_ptr<grpc::ServerCredentials>& credentials);

// A server to call: a connection, and the way to another one.
struct Target {
  std::string address;
  // The host that the server is asked to be, if not where it is.
  std::string host;
  std::shared_ptr<grpc::ChannelCredentials> credentials;
  std::shared_ptr<grpc::Channel> channel;
  Target Connect() const;
};

// A case throws what the server did wrong.
using Cases = std::map<std::string, std::function<void(const Target&)>>;
Cases OfficialCases();
Cases CheckedCases();

template <typename Got, typename Wanted>
void Expect(const std::string& what, const Got& got, const Wanted& wanted) {
  if (got == static_cast<Got>(wanted)) return;
  std::ostringstream text;
  text << what << ": expected " << wanted << ", got " << got;
  throw std::runtime_error(text.str());
}

inline void Succeeded(const grpc::Status& status) {
  if (status.ok()) return;
  throw std::runtime_error("status " + std::to_string(status.error_code()) + ": " + status.error_message());
}

inline void Refused(const grpc::Status& status, grpc::StatusCode code) {
  Expect("status (" + status.error_message() + ")", static_cast<int>(status.error_code()), static_cast<int>(code));
}

// A call's context, with the time limit of a case.
struct Context : grpc::ClientContext {
  Context() { set_deadline(std::chrono::system_clock::now() + kLimit); }
};

// A unary call whose metadata comes back: initial as text, trailing as bytes.
void EchoesMetadata(const Target& target, const std::string& initial, const std::string& trailing);
