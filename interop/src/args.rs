//! The command line. The flags are the ones of gRPC's official interop programs.

use clap::{Parser, Subcommand};

use crate::client::ClientOptions;
use crate::server::ServerOptions;

#[derive(Debug, Parser)]
#[command(name = "interop", version, about = "gRPC's interoperability tests over tonic-rdma")]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// A command of the program.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve grpc.testing.TestService and tonic_rdma.interop.v1.Checked; prints the port first
    Server(ServerOptions),
    /// Run cases against a server; prints a line for each
    Client(ClientOptions),
    /// Serve a tensor device for stock clients; prints the port first
    Tensors,
}
