//! `probe`: each verdict with its exit status.

use std::net::{SocketAddr, TcpListener};
use std::sync::mpsc;

use serde_json::Value;
use tonic::service::Routes;
use tonic::transport::Server;
use tonic_rdma::{RdmaIncoming, RdmaServer};

use super::process::{refused, run, tonic_rdma};

/// Runs a server that takes native calls, or HTTP/2 alone, in a thread that lives as long as the test.
fn start_server(native: bool) -> SocketAddr {
    let (sender, address) = mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let incoming = RdmaIncoming::bind("127.0.0.1:0").await.unwrap();
            sender.send(incoming.local_addr()).unwrap();
            if native {
                RdmaServer::new().add_routes(Routes::default()).serve_with_incoming(incoming).await.unwrap();
            } else {
                let server = Server::builder().add_routes(Routes::default());
                server.serve_with_incoming(incoming).await.unwrap();
            }
        });
    });
    address.recv().unwrap()
}

#[test]
fn a_server_is_probed_over_each_path() {
    let (native, stream) = (start_server(true), start_server(false));
    for (server, is_native) in [(native, true), (stream, false)] {
        let output = run(&["probe", "--json", &server.to_string()]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((&report["verdict"], &report["device"]), (&"rdma".into(), &"soft0".into()), "{report}");
        assert_eq!(report["native"], is_native, "{report}");
        assert!(report["version"].as_u64() >= Some(3), "{report}");
        assert!(report["round_trip_p50_us"].as_f64() > Some(0.0), "{report}");
    }
    let printed = run(&["probe", &format!("http://{native}")]);
    let printed = String::from_utf8_lossy(&printed.stdout).into_owned();
    assert!(printed.contains("verdict: rdma") && printed.contains("calls: native"), "{printed}");

    let over_tcp =
        tonic_rdma(&["probe", &native.to_string()]).env("RDMA_POLICY", "tcp-only").output().unwrap();
    refused(&over_tcp, 3, &[&native.to_string(), "over TCP"]);
    let printed = String::from_utf8_lossy(&over_tcp.stdout).into_owned();
    assert!(printed.contains("verdict: tcp") && printed.contains("reason: "), "{printed}");
}

#[test]
fn what_is_no_server_is_named() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    // Nothing answers there.
    let silent = run(&["probe", "--timeout", "300ms", &address.to_string()]);
    refused(&silent, 1, &[&address.to_string(), "300ms"]);
    drop(listener);
    refused(&run(&["probe", &address.to_string()]), 1, &[&address.to_string()]);
    refused(&run(&["probe", "https://localhost:1"]), 2, &["https"]);
    for bad in ["", "not an address", "localhost", "127.0.0.1:99999", "ftp://localhost:1"] {
        refused(&run(&["probe", bad]), 2, &[&format!("{bad:?} is no server; accepted: HOST:PORT")]);
    }
    refused(&run(&["probe", "--json", "out.json"]), 2, &["the server is missing; accepted: HOST:PORT"]);
}
