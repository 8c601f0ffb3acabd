//! The flags for TLS: their effect on connections, and the errors for wrong flags and files.

use std::path::{Path, PathBuf};

use clap::Parser as _;
use tempfile::TempDir;
use tonic::transport::ServerTlsConfig;

use super::certificates::{Certificates, SERVER};
use super::{failure, serve_with, target};
use crate::client::all;
use crate::server::routes;
use crate::tls::ClientTls;
use crate::transport::Target;
use crate::transport::Transport::{self, Rdma, Tcp};
use crate::{Cli, Command};
use tonic_rdma_commands::Failure;

/// Parses flags of the client, and returns its TLS configuration.
fn client(flags: &[String]) -> Result<Option<ClientTls>, Failure> {
    let rest = flags.iter().map(String::as_str);
    let line = ["interop", "client", "--server_port=1", "--test_case=all"].into_iter().chain(rest);
    match Cli::try_parse_from(line).map_err(|error| Failure::run(error.to_string()))?.command {
        Command::Client(options) => options.tls.load(),
        other => panic!("{other:?}"),
    }
}

/// Parses flags of the server, and returns its TLS configuration.
fn server(flags: &[String]) -> Result<Option<ServerTlsConfig>, Failure> {
    let line = ["interop", "server"].into_iter().chain(flags.iter().map(String::as_str));
    match Cli::try_parse_from(line).map_err(|error| Failure::run(error.to_string()))?.command {
        Command::Server(options) => options.tls.load(),
        other => panic!("{other:?}"),
    }
}

/// Returns `--FLAG=FILE` for each file.
fn flags(files: &[(&str, PathBuf)]) -> Vec<String> {
    let named = files.iter().map(|(flag, path)| format!("--{flag}={}", path.display()));
    ["--use_tls=true".to_owned()].into_iter().chain(named).collect()
}

fn mutual_server(made: &Certificates) -> Vec<String> {
    flags(&[
        ("cert_file", made.file("server.pem")),
        ("key_file", made.file("server.key")),
        ("client_ca_file", made.file("ca.pem")),
    ])
}

/// Returns the flags of a client that trusts `authority` and sends a certificate.
fn mutual_client(made: &Certificates, authority: &str) -> Vec<String> {
    let mut all = flags(&[
        ("ca_file", made.file(authority)),
        ("client_cert_file", made.file("client.pem")),
        ("client_key_file", made.file("client.key")),
    ]);
    all.push("--use_test_ca=true".to_owned());
    all
}

async fn serve(transport: Transport, tls: &[String]) -> u16 {
    serve_with(transport, server(tls).unwrap(), routes().await.unwrap()).await
}

/// Returns the target of a client for a server on `port` with the name in its certificate.
fn protected(port: u16, carrier: Transport, tls: &[String]) -> Target {
    let host_override = Some(SERVER.to_owned());
    Target { tls: client(tls).unwrap(), host_override, ..target(port, carrier, carrier) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_cases_pass_with_mutual_tls_over_rdma() {
    let made = Certificates::make().unwrap();
    let target = protected(serve(Rdma, &mutual_server(&made)).await, Rdma, &mutual_client(&made, "ca.pem"));
    let mut failures = Vec::new();
    for case in all() {
        failures.extend(failure(case.name, &target).await.map(|reason| format!("{}: {reason}", case.name)));
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[tokio::test]
async fn clients_over_tcp_use_the_same_port() {
    let made = Certificates::make().unwrap();
    let server = flags(&[("cert_file", made.file("server.pem")), ("key_file", made.file("server.key"))]);
    let port = serve(Rdma, &server).await;
    for carrier in [Rdma, Tcp] {
        let target = protected(port, carrier, &mutual_client(&made, "ca.pem"));
        assert_eq!(failure("checked_unary", &target).await, None, "{carrier}");
    }
}

#[tokio::test]
async fn untrusted_peers_are_refused() {
    let made = Certificates::make().unwrap();
    let port = serve(Rdma, &mutual_server(&made)).await;
    let mut anonymous = flags(&[("ca_file", made.file("ca.pem"))]);
    anonymous.push("--use_test_ca".to_owned());
    let unnamed = |target: Target| Target { host_override: None, ..target };
    for carrier in [Rdma, Tcp] {
        let good = protected(port, carrier, &mutual_client(&made, "ca.pem"));
        for (what, target, expected) in [
            ("authority", protected(port, carrier, &mutual_client(&made, "other-ca.pem")), "UnknownIssuer"),
            ("host", unnamed(good.clone()), "not valid for name"),
            ("no certificate", protected(port, carrier, &anonymous), "CertificateRequired"),
        ] {
            let reason = failure("empty_unary", &target).await.unwrap_or_else(|| panic!("{what}: it passed"));
            assert!(reason.contains(expected), "{what} over {carrier}: {reason}");
        }
        let plain = Target { tls: None, ..good };
        assert!(failure("empty_unary", &plain).await.is_some(), "plaintext over {carrier}");
    }
}

#[tokio::test]
async fn the_host_override_is_the_authority_of_requests() {
    let plain = serve(Rdma, &[]).await;
    let asking = |host: &str| Target { host_override: Some(host.to_owned()), ..target(plain, Rdma, Rdma) };
    assert_eq!(failure("empty_unary", &asking(SERVER)).await, None);
    for wrong in ["", "a b", "a/b"] {
        let reason = failure("empty_unary", &asking(wrong)).await.unwrap();
        assert!(reason.contains("--server_host_override"), "{wrong}: {reason}");
    }
}

#[test]
fn contradictory_flags_are_refused() {
    let made = Certificates::make().unwrap();
    let ca = format!("--ca_file={}", made.file("ca.pem").display());
    let client_key = format!("--client_key_file={}", made.file("client.key").display());
    for (flags, expected) in [
        (vec!["--use_tls", "--use_test_ca"], "--use_test_ca needs --ca_file"),
        (vec!["--use_tls", &ca], "--ca_file is of no use without --use_test_ca"),
        (vec![&ca], "--ca_file is of no use without --use_tls"),
        (vec!["--use_tls=false", "--use_test_ca=true", &ca], "--ca_file is of no use without --use_tls"),
        (vec!["--use_tls", &client_key], "--client_cert_file"),
        (vec!["--use_tls=maybe"], "--use_tls"),
    ] {
        let owned: Vec<_> = flags.iter().map(|flag| (*flag).to_owned()).collect();
        let error = client(&owned).expect_err(&format!("{flags:?}")).to_string();
        assert!(error.contains(expected), "{flags:?}: {error}");
    }
    for (flags, expected) in [
        (vec!["--use_tls=true".to_owned()], "--use_tls needs --cert_file and --key_file"),
        (mutual_server(&made)[1..].to_vec(), "--cert_file is of no use without --use_tls"),
        (mutual_server(&made)[..2].to_vec(), "--key_file"),
    ] {
        let error = server(&flags).expect_err(&format!("{flags:?}")).to_string();
        assert!(error.contains(expected), "{flags:?}: {error}");
    }
    // The official programs ignore --use_test_ca without TLS, and so does this one.
    assert!(client(&["--use_tls=false".to_owned(), "--use_test_ca=true".to_owned()]).unwrap().is_none());
}

/// Checks every flag with every kind of wrong file.
#[test]
fn errors_name_wrong_files() {
    let made = Certificates::make().unwrap();
    let folder = TempDir::new().unwrap();
    let text = |name: &str| std::fs::read_to_string(made.file(name)).unwrap();
    let write = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    };
    let pem =
        |label: &str, base64: &str| format!("-----BEGIN {label}-----\n{base64}\n-----END {label}-----\n");
    let anywhere = [
        (folder.path().join("nowhere.pem"), "can't be read"),
        (folder.path().to_owned(), "not a regular file"),
        (PathBuf::from("/dev/zero"), "not a regular file"),
        (write("empty", b""), "in PEM: no items found"),
        (write("large", &vec![b'x'; (1 << 20) + 1]), "larger than 1048576 bytes"),
        (write("text", b"\xff\xfe and no PEM"), "in PEM: no items found"),
        (write("der", &[0x30, 0x82, 1, 2]), "in PEM: no items found"),
    ];
    let certificate = [
        (made.file("client.key"), "no certificate in PEM"),
        (write("cut", &text("server.pem").as_bytes()[..200]), "no certificate in PEM"),
        (write("base64", pem("CERTIFICATE", "!!!!").as_bytes()), "no certificate in PEM"),
        (write("asn1", pem("CERTIFICATE", "AAAA").as_bytes()), "certificate"),
        (write("second", (text("ca.pem") + &pem("CERTIFICATE", "AAAA")).as_bytes()), "certificate"),
    ];
    let key = [
        (made.file("client.pem"), "no private key in PEM"),
        (write("encrypted", pem("ENCRYPTED PRIVATE KEY", "AAAA").as_bytes()), "no private key in PEM"),
        (write("nokey", pem("PRIVATE KEY", "AAAA").as_bytes()), "not the key of the certificate"),
    ];
    let of_certificates: Vec<_> = anywhere.iter().chain(&certificate).collect();
    let of_keys: Vec<_> = anywhere.iter().chain(&key).collect();
    for (flag, files) in [
        ("--ca_file", &of_certificates),
        ("--client_cert_file", &of_certificates),
        ("--client_key_file", &of_keys),
    ] {
        for (path, expected) in files {
            let error =
                client(&with(&mutual_client(&made, "ca.pem"), flag, path)).expect_err(expected).to_string();
            named(&error, flag, path, expected);
        }
    }
    for (flag, files) in
        [("--cert_file", &of_certificates), ("--client_ca_file", &of_certificates), ("--key_file", &of_keys)]
    {
        for (path, expected) in files {
            let error = server(&with(&mutual_server(&made), flag, path)).expect_err(expected).to_string();
            named(&error, flag, path, expected);
        }
    }
    let (other, flag) = (made.file("client.key"), "--key_file");
    let error = server(&with(&mutual_server(&made), flag, &other)).unwrap_err().to_string();
    named(&error, flag, &other, "not the key of the certificate in --cert_file");
}

/// Returns the flags, one of them with another file.
fn with(flags: &[String], flag: &str, path: &Path) -> Vec<String> {
    let begin = format!("{flag}=");
    let other = |one: &String| {
        if one.starts_with(&begin) { format!("{begin}{}", path.display()) } else { one.clone() }
    };
    flags.iter().map(other).collect()
}

fn named(error: &str, flag: &str, path: &Path, expected: &str) {
    let path = path.display().to_string();
    assert!(error.starts_with(flag) && error.contains(&path) && error.contains(expected), "{path}: {error}");
}

/// Checks that a logged target has no private key.
#[test]
fn keys_are_not_shown() {
    let made = Certificates::make().unwrap();
    let shown = format!("{:?}", protected(1, Tcp, &mutual_client(&made, "ca.pem")));
    assert!(shown.contains("ClientTls") && !shown.contains("identity"), "{shown}");
    assert!(!format!("{:?}", server(&mutual_server(&made))).contains("identity"));
}
