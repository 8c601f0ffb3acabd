// A gRPC peer in C++, with the flags of gRPC's official interop programs (see interop/README.md).
//
//   peer server --port=PORT
//   peer client --server_host=HOST --server_port=PORT --test_case=NAME[,NAME...]
//   peer client --list
#include "peer.h"

#include <iostream>

namespace {

const std::map<std::string, std::string> kCannot = {{"checked_zstd", "C-core has no zstd"}};

// The values of flags such as --port=1.
Flags Parse(int count, char** arguments) {
  Flags flags;
  for (int at = 2; at < count; ++at) {
    std::string text = arguments[at];
    size_t equals = std::min(text.find('='), text.size());
    flags[text.substr(0, equals)] = equals < text.size() ? text.substr(equals + 1) : "";
  }
  return flags;
}

std::string OneLine(std::string text) {
  for (char& it : text) {
    if (static_cast<unsigned char>(it) < ' ') it = ' ';
  }
  return text.substr(0, 600);
}

std::string Outcome(const Cases& cases, const std::string& name, const Target& target) {
  auto found = cases.find(name);
  if (found == cases.end()) {
    auto reason = kCannot.find(name);
    return "skipped: " + (reason == kCannot.end() ? "this peer does not have the case" : reason->second);
  }
  try {
    found->second(target.Connect());
    return "ok";
  } catch (const std::exception& error) {
    return "failed: " + OneLine(error.what());
  }
}

}  // namespace

Target Target::Connect() const {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kLargest);
  arguments.SetMaxSendMessageSize(kLargest);
  // A connection of its own: the library shares those of channels that are alike.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  if (!host.empty()) {
    arguments.SetSslTargetNameOverride(host);
    arguments.SetString(GRPC_ARG_DEFAULT_AUTHORITY, host);
  }
  return {address, host, credentials, grpc::CreateCustomChannel(address, credentials, arguments)};
}

int Run(int count, char** arguments) {
  auto flags = Parse(count, arguments);
  std::string program = count > 1 ? arguments[1] : "";
  if (program == "server") return Serve(std::atoi(flags["--port"].c_str()), ServerCredentials(flags));
  if (program != "client") {
    std::cerr << "peer server|client, see interop/README.md" << std::endl;
    return 2;
  }
  Cases cases = OfficialCases();
  cases.merge(CheckedCases());
  if (flags.count("--list")) {
    for (auto& it : cases) std::cout << it.first << "\n";
    return 0;
  }
  std::string address = flags["--server_host"] + ":" + flags["--server_port"];
  Target target{address, flags["--server_host_override"], ClientCredentials(flags), nullptr};
  int failed = 0;
  std::istringstream names(flags["--test_case"]);
  for (std::string name; std::getline(names, name, ',');) {
    std::string outcome = Outcome(cases, name, target);
    std::cout << name << " " << outcome << std::endl;
    if (outcome.rfind("failed", 0) == 0) failed = 1;
  }
  return failed;
}

int main(int count, char** arguments) {
  try {
    return Run(count, arguments);
  } catch (const std::exception& error) {
    std::cerr << "peer: " << error.what() << std::endl;
    return 2;
  }
}
