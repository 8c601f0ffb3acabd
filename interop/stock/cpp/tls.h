// TLS: the official programs' flags, those that name files, and credentials from them.
#pragma once

#include <map>
#include <memory>
#include <string>

#include <grpcpp/grpcpp.h>

using Flags = std::map<std::string, std::string>;

// Without --use_tls=true these are credentials of plaintext. A file that can't be read is an error that is thrown.
std::shared_ptr<grpc::ChannelCredentials> ClientCredentials(const Flags& flags);
// With --client_ca_file each client has to show a certificate.
std::shared_ptr<grpc::ServerCredentials> ServerCredentials(const Flags& flags);
