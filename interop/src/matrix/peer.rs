//! The peers, and the commands that run their programs.

use std::path::{Path, PathBuf};
use std::process::Command;

use clap::ValueEnum;
use tonic_rdma_commands::{Failure, Named as _};

use crate::direction::{Direction, Role};

/// A gRPC library of another project, or our package for Python.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Peer {
    /// tonic with its own transport.
    Tonic,
    /// grpcio, on C-core.
    Python,
    /// Our package for Python, in the programs of the peer `python`.
    PythonRdma,
    /// grpc-js, on the HTTP/2 of Node.
    Node,
    /// The official client and server of Debian's ruby-grpc, unchanged.
    Ruby,
    /// grpc-go, with its own HTTP/2.
    Go,
    /// gRPC's own client and server in C++, from the source of Debian's grpc, unchanged.
    CppOfficial,
}

/// The command line of a peer's programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CommandLine {
    /// Our command line (interop/README.md).
    Ours,
    /// The command line of the official programs: one case for each process, and a server that needs a port.
    Official,
}

/// Cases of the official client in Ruby's package.
const RUBY: [&str; 15] = [
    "empty_unary",
    "large_unary",
    "client_compressed_unary",
    "client_compressed_streaming",
    "client_streaming",
    "server_streaming",
    "ping_pong",
    "empty_stream",
    "custom_metadata",
    "status_code_and_message",
    "unimplemented_method",
    "unimplemented_service",
    "cancel_after_begin",
    "cancel_after_first_response",
    "timeout_on_sleeping_server",
];

/// Our cases that call the official service.
const CHECKED_OFFICIAL: [&str; 2] = ["checked_binary_metadata", "checked_large_metadata"];

/// Official cases that gRPC's client in C++ lacks.
const NOT_IN_CPP: [&str; 2] = ["cacheable_unary", "concurrent_large_unary"];

/// Official cases that gRPC's client in C++ has, and our client lacks.
const MORE_IN_CPP: [&str; 2] = ["half_duplex", "pick_first_unary"];

impl Peer {
    pub(crate) fn command_line(self) -> CommandLine {
        if matches!(self, Self::Ruby | Self::CppOfficial) { CommandLine::Official } else { CommandLine::Ours }
    }

    /// Returns whether the peer takes part in `direction`. Servers of ours are in Rust, as tonic's, or in
    /// Python. A server in Python has RDMA, so nothing falls back.
    pub(crate) fn takes_part_in(self, direction: Direction) -> bool {
        match direction.without_tls() {
            Direction::Ours | Direction::OursNative => matches!(self, Self::Tonic | Self::PythonRdma),
            Direction::DirectNative => self == Self::PythonRdma,
            Direction::Fallback => self != Self::PythonRdma,
            _ => true,
        }
    }

    /// Returns what carries the calls of the peer's client, if the client can check it.
    fn carrier(self, direction: Direction) -> Option<&'static str> {
        (self == Self::PythonRdma).then(|| match direction.without_tls() {
            Direction::Direct => "rdma",
            Direction::DirectNative => "native",
            _ => "tcp",
        })
    }

    /// Returns the reason why the peer can't run, or `None` if it can.
    pub(crate) fn unavailable(self, paths: &Paths) -> Option<String> {
        let installed = self.installed(paths)?;
        if installed.exists() {
            return None;
        }
        // The installer writes the reason to this file.
        let reason = std::fs::read_to_string(paths.stock.join(self.name()).join("unavailable")).ok();
        Some(reason.map_or(format!("{} is not there", installed.display()), |it| it.trim().to_owned()))
    }

    /// Returns a file or folder that has to exist, or `None` for a peer that cargo builds.
    fn installed(self, paths: &Paths) -> Option<PathBuf> {
        match self {
            Self::Tonic => None,
            Self::Python => Some(paths.stock.join("python/bin/python")),
            Self::PythonRdma => Some(paths.stock.join("python-rdma/tonic_rdma/_native.abi3.so")),
            Self::Node => Some(paths.stock.join("node/node_modules/@grpc/grpc-js")),
            Self::Ruby => Some(paths.stock.join("ruby/official/client.rb")),
            Self::Go => Some(paths.stock.join("go/peer")),
            Self::CppOfficial => Some(paths.stock.join("cpp-official/interop_client")),
        }
    }

    /// Returns the reason why the peer's program lacks the case, if the program does not report it itself.
    pub(crate) fn lacks(self, role: Role, case: &str) -> Option<String> {
        if (self, role, case) == (Self::Ruby, Role::Server, "concurrent_large_unary") {
            return Some(
                "ruby's official server has 30 threads, and refuses calls for which none is free".to_owned(),
            );
        }
        // The official servers serve the official service alone.
        let official = !case.starts_with("checked_") || CHECKED_OFFICIAL.contains(&case);
        let has = match (self, role) {
            (Self::Ruby, Role::Client) => RUBY.contains(&case),
            (Self::Ruby, Role::Server) => official && case != "cacheable_unary",
            (Self::CppOfficial, Role::Client) => !case.starts_with("checked_") && !NOT_IN_CPP.contains(&case),
            (Self::CppOfficial, Role::Server) => official,
            _ => true,
        };
        (!has).then(|| format!("{}'s official {role} does not have it", self.name()))
    }

    /// Returns the cases of the peer's official client that our client lacks.
    pub(crate) fn more_cases(self, role: Role) -> &'static [&'static str] {
        if (self, role) == (Self::CppOfficial, Role::Client) { &MORE_IN_CPP } else { &[] }
    }

    /// Returns the text that an official client has to log for the case. gRPC's client in C++ stops two
    /// cases, and ends with 0, if the server does not refuse the first call.
    pub(crate) fn proof(self, case: &str) -> Option<&'static str> {
        match (self, case) {
            (Self::CppOfficial, "client_compressed_unary") => {
                Some("Compressed unary request probe succeeded")
            }
            (Self::CppOfficial, "client_compressed_streaming") => {
                Some("Compressed streaming request probe succeeded")
            }
            _ => None,
        }
    }

    /// Returns the folder with the certificates of the official programs, which take no others.
    pub(crate) fn test_certificates(self, paths: &Paths) -> PathBuf {
        match self {
            Self::Ruby => self.official(paths).join("../../spec/testdata"),
            _ => paths.stock.join(self.name()).join("certificates"),
        }
    }

    /// Returns the reason why the peer has no TLS here, or `None` if it has.
    pub(crate) fn lacks_tls(self, paths: &Paths) -> Option<String> {
        let needed = self.test_certificates(paths).join("server1.key");
        let lacking = self.command_line() == CommandLine::Official && !needed.exists();
        lacking.then(|| {
            format!("{}'s package has no certificates: {} is not there", self.name(), needed.display())
        })
    }

    /// Returns the folder of the official programs. It resolves links, because the programs look for their
    /// messages beside their real location.
    fn official(self, paths: &Paths) -> PathBuf {
        let folder = paths.stock.join(self.name()).join("official");
        folder.canonicalize().unwrap_or(folder)
    }

    pub(crate) fn client(self, paths: &Paths, port: u16, cases: &str, direction: Direction) -> Command {
        let mut command = self.program(paths, Role::Client);
        command.args(self.carrier(direction).map(|it| format!("--require={it}")));
        command
            .arg("--server_host=127.0.0.1")
            .arg(format!("--server_port={port}"))
            .arg(format!("--test_case={cases}"));
        if self == Self::CppOfficial {
            // The program's default limits of the soaks are 0.
            command.args(["--soak_iterations=100", "--soak_overall_timeout_seconds=30"]);
            command.arg("--soak_per_iteration_max_acceptable_latency_ms=30000");
            if self.proof(cases).is_some() {
                command.env("GRPC_VERBOSITY", "DEBUG");
            }
        }
        command
    }

    pub(crate) fn server(self, paths: &Paths, port: u16) -> Command {
        let mut command = self.program(paths, Role::Server);
        command.arg(format!("--port={port}"));
        command
    }

    fn program(self, paths: &Paths, role: Role) -> Command {
        let role = role.to_string();
        let mut command;
        match self {
            Self::Tonic => {
                command = Command::new(&paths.interop);
                command.args([&role, "--transport=tcp"]);
            }
            Self::Python | Self::PythonRdma => {
                command = Command::new(paths.stock.join("python/bin/python"));
                command.arg("interop/stock/python").arg(role).env("PYTHONDONTWRITEBYTECODE", "1");
                if self == Self::PythonRdma {
                    command.arg("--implementation=tonic_rdma");
                    command.env("PYTHONPATH", paths.stock.join("python-rdma"));
                }
            }
            Self::Node => {
                command = Command::new("node");
                command.arg("interop/stock/node/peer.js").arg(role);
                command.env("NODE_PATH", paths.stock.join("node/node_modules"));
            }
            Self::Ruby => {
                command = Command::new("ruby");
                command.arg(self.official(paths).join(format!("{role}.rb")));
            }
            Self::Go => {
                command = Command::new(paths.stock.join(self.name()).join("peer"));
                command.arg(role);
            }
            Self::CppOfficial => {
                command = Command::new(paths.stock.join(self.name()).join(format!("interop_{role}")));
            }
        }
        command.current_dir(&paths.root);
        command
    }
}

tonic_rdma_commands::displayed_by_name!(Peer);

/// Paths of the programs that the matrix starts.
#[derive(Debug)]
pub(crate) struct Paths {
    /// The root of the repository.
    pub(crate) root: PathBuf,
    /// The folder with the installed peers.
    pub(crate) stock: PathBuf,
    /// Our test server and client.
    pub(crate) interop: PathBuf,
    /// The command `tonic-rdma`, which has the bridge.
    pub(crate) command: PathBuf,
}

impl Paths {
    /// Finds our programs beside this one. `stock` is relative to the root of the repository.
    ///
    /// # Errors
    /// The program does not run in the root of the repository, or one of our programs is not built.
    pub(crate) fn find(stock: &Path) -> Result<Self, Failure> {
        let root = std::env::current_dir()?;
        if !root.join("interop/stock").is_dir() {
            return Err(format!("{} is not the repository's root", root.display()).into());
        }
        let this_program = std::env::current_exe()?;
        let built = |name: &str| {
            let path = this_program.with_file_name(name);
            if path.is_file() {
                Ok(path)
            } else {
                Err(Failure::run(format!("{} is not built", path.display())))
            }
        };
        Ok(Self { stock: root.join(stock), interop: built("interop")?, command: built("tonic-rdma")?, root })
    }
}
