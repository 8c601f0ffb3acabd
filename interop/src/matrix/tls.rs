//! TLS in the matrix: the certificates of a combination, the flags for them, and the connections that must be
//! refused.

use std::path::PathBuf;

use crate::certificates::{Certificates, SERVER};
use crate::outcome::{NO_LINE, Outcome};
use crate::peer::{CommandLine, Paths, Peer};

/// Default cases of directions with TLS. TLS changes the bytes, and the start and the end of connections, but
/// not the calls.
pub(crate) const CASES: [&str; 10] = [
    "empty_unary",
    "large_unary",
    "concurrent_large_unary",
    "ping_pong",
    "empty_stream",
    "custom_metadata",
    "status_code_and_message",
    "checked_unary",
    "checked_ping_pong",
    "checked_half_close",
];

/// A fault of a client. The client or the server has to refuse the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClientFault {
    /// The client trusts an authority that did not sign the server's certificate.
    Authority,
    /// The client asks for a host that the server's certificate is not for.
    Host,
    /// The client sends no certificate to a server that requires one.
    NoCertificate,
}

impl ClientFault {
    /// All faults. The server may refuse the first one without a message. The others need a running server,
    /// and show that it still runs.
    pub(crate) const ALL: [Self; 3] = [Self::NoCertificate, Self::Authority, Self::Host];

    /// Returns the name of the case in lists.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Authority => "tls_wrong_authority",
            Self::Host => "tls_wrong_host",
            Self::NoCertificate => "tls_no_certificate",
        }
    }

    /// Returns the outcome of the refusal from the outcome of the call.
    pub(crate) fn judge(self, outcome: Outcome) -> Outcome {
        let Outcome::Failed(reason) = outcome else {
            return match outcome {
                Outcome::Passed => Outcome::Failed("the call was answered".to_owned()),
                other => other,
            };
        };
        let text = reason.to_lowercase();
        let has = |any: &[&str]| any.iter().any(|it| text.contains(it));
        if reason.starts_with(NO_LINE) {
            return Outcome::Failed(reason);
        }
        if has(&["not done after", "did not end within", "deadline", "took too long"]) {
            return Outcome::Failed(format!("refused by time-out alone: {reason}"));
        }
        // In TLS 1.3 a client has finished before the server checks its certificate. It may see the end of
        // the connection only.
        let clear = self == Self::NoCertificate || has(&["certificate", "hostname", "ssl handshake", "x509"]);
        if clear { Outcome::Passed } else { Outcome::Failed(format!("refused, and not for TLS: {reason}")) }
    }
}

/// Certificates of one combination.
#[derive(Debug)]
pub(crate) struct Tls {
    command_line: CommandLine,
    authority: PathBuf,
    other_authority: PathBuf,
    server: (PathBuf, PathBuf),
    /// Certificate and key of the client. With them TLS is mutual.
    client: Option<(PathBuf, PathBuf)>,
    host: &'static str,
    /// True if the peer's client always asks for the host of its own certificate.
    host_is_fixed: bool,
}

impl Tls {
    /// Returns the certificates of this run. For the official programs it returns the ones in their package,
    /// because they take no others.
    pub(crate) fn new(paths: &Paths, certificates: &Certificates, peer: Peer) -> Self {
        let other_authority = certificates.file("other-ca.pem");
        match peer.command_line() {
            CommandLine::Ours => Self {
                command_line: CommandLine::Ours,
                authority: certificates.file("ca.pem"),
                other_authority,
                server: (certificates.file("server.pem"), certificates.file("server.key")),
                client: Some((certificates.file("client.pem"), certificates.file("client.key"))),
                host: SERVER,
                host_is_fixed: false,
            },
            CommandLine::Official => {
                let package = peer.test_certificates(paths);
                Self {
                    command_line: CommandLine::Official,
                    authority: package.join("ca.pem"),
                    other_authority,
                    server: (package.join("server1.pem"), package.join("server1.key")),
                    client: None,
                    host: "foo.test.google.fr",
                    host_is_fixed: peer == Peer::CppOfficial,
                }
            }
        }
    }

    /// Returns the flags of a server with this command line.
    pub(crate) fn server(&self, command_line: CommandLine) -> Vec<String> {
        let mut flags = vec!["--use_tls=true".to_owned()];
        if command_line == CommandLine::Ours {
            flags.push(file("cert_file", &self.server.0));
            flags.push(file("key_file", &self.server.1));
            flags.extend(self.client.is_some().then(|| file("client_ca_file", &self.authority)));
        }
        flags
    }

    /// Returns the flags of a client with this `fault`.
    pub(crate) fn client(&self, command_line: CommandLine, fault: Option<ClientFault>) -> Vec<String> {
        let host = if fault == Some(ClientFault::Host) { "elsewhere.interop.test" } else { self.host };
        let mut flags = vec!["--use_tls=true".to_owned(), "--use_test_ca=true".to_owned()];
        flags.push(format!("--server_host_override={host}"));
        if command_line == CommandLine::Ours {
            let authority =
                if fault == Some(ClientFault::Authority) { &self.other_authority } else { &self.authority };
            flags.push(file("ca_file", authority));
            if let Some((certificate, key)) =
                self.client.as_ref().filter(|_| fault != Some(ClientFault::NoCertificate))
            {
                flags.push(file("client_cert_file", certificate));
                flags.push(file("client_key_file", key));
            }
        }
        flags
    }

    /// Returns the reason why a client with this command line can't have this fault, or `None` if it can.
    pub(crate) fn lacks(&self, client: CommandLine, fault: ClientFault) -> Option<&'static str> {
        match fault {
            ClientFault::Authority if client == CommandLine::Official => {
                Some("the official client trusts the authority inside its package, and takes no other")
            }
            ClientFault::Host if client == CommandLine::Official && self.host_is_fixed => {
                Some("the official client always asks for the host of its own certificate")
            }
            ClientFault::NoCertificate if self.command_line == CommandLine::Official => {
                Some("the official programs have no mutual TLS")
            }
            _ => None,
        }
    }
}

fn file(flag: &str, path: &std::path::Path) -> String {
    format!("--{flag}={}", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(reason: &str) -> Outcome {
        Outcome::Failed(reason.to_owned())
    }

    #[test]
    fn a_refused_fault_has_passed() {
        let refused = failed("invalid peer certificate: UnknownIssuer");
        assert_eq!(ClientFault::Authority.judge(refused), Outcome::Passed);
        assert_eq!(ClientFault::NoCertificate.judge(failed("Socket closed")), Outcome::Passed);
    }

    #[test]
    fn an_accepted_fault_has_failed() {
        assert!(matches!(ClientFault::Authority.judge(Outcome::Passed), Outcome::Failed(_)));
    }

    #[test]
    fn a_refusal_for_another_reason_has_failed() {
        for reason in ["not done after 30 s", "DEADLINE_EXCEEDED: certificate", "connection refused"] {
            assert!(matches!(ClientFault::Host.judge(failed(reason)), Outcome::Failed(_)), "{reason}");
        }
        // The client made no call.
        let no_line = format!("{NO_LINE}: exit status: 2: --client_cert_file: no certificate in it");
        assert!(matches!(ClientFault::NoCertificate.judge(failed(&no_line)), Outcome::Failed(_)));
    }
}
