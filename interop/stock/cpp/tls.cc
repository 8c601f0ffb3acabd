#include "tls.h"

#include <fstream>
#include <sstream>
#include <stdexcept>

namespace {

std::string Value(const Flags& flags, const std::string& name) {
  auto found = flags.find("--" + name);
  return found == flags.end() ? "" : found->second;
}

bool Wanted(const Flags& flags, const std::string& name) {
  if (!flags.count("--" + name)) return false;
  std::string value = Value(flags, name);
  if (value != "true" && value != "false") throw std::runtime_error("--" + name + ": true or false, not " + value);
  return value == "true";
}

std::string Content(const Flags& flags, const std::string& name, bool needed) {
  std::string path = Value(flags, name);
  if (path.empty() && needed) throw std::runtime_error("--" + name + " is missing");
  if (path.empty()) return "";
  std::ifstream file(path);
  std::ostringstream text;
  // Nothing in it, or a folder, is an error too.
  if (!file || !(text << file.rdbuf())) throw std::runtime_error("--" + name + ": can't read " + path);
  if (text.str().find("-----BEGIN ") == std::string::npos) throw std::runtime_error("--" + name + ": no PEM in " + path);
  return text.str();
}

}  // namespace

std::shared_ptr<grpc::ChannelCredentials> ClientCredentials(const Flags& flags) {
  if (!Wanted(flags, "use_tls")) return grpc::InsecureChannelCredentials();
  grpc::SslCredentialsOptions options;
  if (Wanted(flags, "use_test_ca")) options.pem_root_certs = Content(flags, "ca_file", true);
  options.pem_cert_chain = Content(flags, "client_cert_file", false);
  options.pem_private_key = Content(flags, "client_key_file", !options.pem_cert_chain.empty());
  return grpc::SslCredentials(options);
}

std::shared_ptr<grpc::ServerCredentials> ServerCredentials(const Flags& flags) {
  if (!Wanted(flags, "use_tls")) return grpc::InsecureServerCredentials();
  grpc::SslServerCredentialsOptions options;
  options.pem_root_certs = Content(flags, "client_ca_file", false);
  options.pem_key_cert_pairs = {{Content(flags, "key_file", true), Content(flags, "cert_file", true)}};
  if (!options.pem_root_certs.empty()) {
    options.client_certificate_request = GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY;
  }
  return grpc::SslServerCredentials(options);
}
