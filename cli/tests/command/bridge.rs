//! `tonic-rdma bridge` between clients and servers without RDMA: the bytes, the ends of streams, and the
//! death of each process.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use super::bridge_processes::{
    self, Bridge, BridgePair, Busy, TIMEOUT, content, eventually, first_that_sends, prepare, spawn_echo,
    spawn_sink, stopped,
};

/// A number of bytes that is larger than all buffers on the way together.
const PLENTY: usize = 8 << 20;

/// Sends `sent` and ends its direction, and reads to the end at the same time.
fn exchange(mut stream: TcpStream, sent: &[u8]) -> io::Result<Vec<u8>> {
    prepare(&stream);
    let (mut writer, all) = (stream.try_clone()?, sent.to_vec());
    let sender = std::thread::spawn(move || {
        writer.write_all(&all)?;
        writer.shutdown(Shutdown::Write)
    });
    let mut got = Vec::new();
    stream.read_to_end(&mut got)?;
    sender.join().unwrap()?;
    Ok(got)
}

fn ends_with_reset(stream: &mut TcpStream) {
    let mut rest = Vec::new();
    let error = stream.read_to_end(&mut rest).expect_err("a stream that was cut short looks complete");
    assert_eq!(error.kind(), io::ErrorKind::ConnectionReset, "{error}");
}

#[test]
fn bytes_pass_unchanged_between_all_kinds_of_addresses() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| format!("unix:{}", folder.path().join(name).display());
    let unix = path("server");
    let listener = UnixListener::bind(folder.path().join("server")).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream: UnixStream = stream.unwrap();
            std::thread::spawn(move || io::copy(&mut stream.try_clone().unwrap(), &mut stream));
        }
    });
    let (four, six) = (spawn_echo("127.0.0.1:0"), spawn_echo("[::1]:0"));
    let far_four = Bridge::start("rdma://127.0.0.1:0", &format!("tcp://{four}"), &[]);
    let far_six = Bridge::start("rdma://[::1]:0", &format!("tcp://{six}"), &[]);
    let far_unix = Bridge::start("rdma://localhost:0", &unix, &[]);
    let named = format!("unix:@tonic-rdma-test-{}", std::process::id());
    let near_named = Bridge::start(&named, &far_four.address, &[]);
    let by_path = Bridge::start(&path("near"), &far_six.address, &[]);
    let targets = [
        format!("tcp://{six}"),
        unix,
        far_four.address.clone(),
        far_six.address.clone(),
        far_unix.address.clone(),
        named,
        path("near"),
    ];
    for target in &targets {
        for listen in ["tcp://127.0.0.1:0", "tcp://[::1]:0", "rdma://127.0.0.1:0"] {
            let bridge = Bridge::start(listen, target, &[]);
            let sent = content(300_000, 1);
            let got = exchange(bridge.connect(), &sent)
                .unwrap_or_else(|error| panic!("{listen} {target}: {error}"));
            assert!(got == sent, "{listen} {target}: {} bytes of {}", got.len(), sent.len());
        }
    }
    drop((near_named, by_path));
    assert!(!folder.path().join("near").exists(), "the socket's file is still there");
}

#[test]
fn several_routes_carry_much_data_both_ways() {
    let server = spawn_echo("127.0.0.1:0");
    let far = Bridge::start("rdma://127.0.0.1:0", &format!("tcp://{server}"), &["--threads", "2"]);
    let direct = format!("tcp://{server}");
    let near = Bridge::start(
        "tcp://127.0.0.1:0",
        &far.address,
        &["--listen", "tcp://127.0.0.1:0", "--connect", &direct, "--policy", "require"],
    );
    let sent = content(PLENTY, 2);
    for address in [near.address.clone(), near.another_route()] {
        let stream = TcpStream::connect(address.trim_start_matches("tcp://")).unwrap();
        assert!(exchange(stream, &sent).unwrap() == sent);
    }
}

#[test]
fn the_end_of_one_direction_does_not_end_the_other_direction() {
    let pair = BridgePair::new();
    // The client ends first. The server sees the end, and sends much data after it.
    let (mut client, mut server) = pair.connected();
    client.write_all(b"question").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    let mut heard = Vec::new();
    server.read_to_end(&mut heard).unwrap();
    assert_eq!(heard, b"question");
    let answer = content(PLENTY, 3);
    let (sent, mut writer) = (answer.clone(), server);
    let sender = std::thread::spawn(move || writer.write_all(&sent));
    // A slow reader gets all data, even long after the server has closed.
    std::thread::sleep(Duration::from_millis(300));
    let mut got = Vec::new();
    client.read_to_end(&mut got).unwrap();
    sender.join().unwrap().unwrap();
    assert!(got == answer, "{} bytes of {}", got.len(), answer.len());

    // The server ends first.
    let (mut client, mut server) = pair.connected();
    server.write_all(b"greeting").unwrap();
    server.shutdown(Shutdown::Write).unwrap();
    let mut heard = Vec::new();
    client.read_to_end(&mut heard).unwrap();
    assert_eq!(heard, b"greeting");
    client.write_all(b"late").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    heard.clear();
    server.read_to_end(&mut heard).unwrap();
    assert_eq!(heard, b"late");
}

#[test]
fn a_reader_that_does_not_read_stops_the_writer() {
    let pair = BridgePair::new();
    let (mut client, mut server) = pair.connected();
    let before = pair.resident();
    client.set_write_timeout(Some(Duration::from_secs(1))).unwrap();
    let (chunk, mut sent) = (content(1 << 20, 4), 0);
    // Writes until the bridge takes nothing for a second.
    let stopped = loop {
        match client.write(&chunk[sent % chunk.len()..]) {
            Ok(count) => sent += count,
            Err(error) => break error,
        }
        assert!(sent < 1 << 30, "the bridge took a gigabyte although the server does not read");
    };
    assert_eq!(stopped.kind(), io::ErrorKind::WouldBlock, "{stopped}");
    let grown = pair.resident().saturating_sub(before);
    assert!(grown < 64 << 20, "{grown} bytes more are resident");
    // All of the data still arrives.
    client.shutdown(Shutdown::Write).unwrap();
    let mut got = Vec::new();
    server.read_to_end(&mut got).unwrap();
    assert_eq!(got.len(), sent);
    assert!(got.chunks(chunk.len()).all(|part| *part == chunk[..part.len()]));
}

#[test]
fn a_thousand_connections_are_carried_at_once() {
    const COUNT: usize = 1000;
    let server = spawn_echo_all();
    let pair = BridgePair::to(&server);
    let mut clients: Vec<TcpStream> = (0..COUNT).map(|_| pair.near.connect()).collect();
    for (index, client) in clients.iter_mut().enumerate() {
        client.write_all(&content(1000, index as u64)).unwrap();
    }
    // Each connection got an answer while all the others were open.
    for (index, client) in clients.iter_mut().enumerate() {
        let mut got = vec![0; 1000];
        client.read_exact(&mut got).unwrap_or_else(|error| {
            panic!("connection {index}: {error}\nnear: {}\nfar: {}", pair.near.log(), pair.far.log())
        });
        assert!(got == content(1000, index as u64), "connection {index}");
    }
    eventually("all are counted", || pair.far.metric("tonic_rdma_bridge_connections{") == COUNT as f64);
    drop(clients);
    let mut left = COUNT as f64;
    while left > 0.0 {
        let before = left;
        eventually("some more are closed", || {
            left = pair.far.metric("tonic_rdma_bridge_connections{");
            left < before
        });
    }
}

/// Starts a server that echoes short messages without a thread for each connection.
fn spawn_echo_all() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            listener.set_nonblocking(true).unwrap();
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                tokio::spawn(async move {
                    let (mut reader, mut writer) = stream.split();
                    let _ = tokio::io::copy(&mut reader, &mut writer).await;
                });
            }
        });
    });
    address
}

#[test]
fn a_killed_bridge_resets_both_ends() {
    for victim in ["near", "far"] {
        let mut pair = BridgePair::new();
        let (mut client, mut server) = pair.connected();
        server.write_all(b"the beginning").unwrap();
        let mut got = [0; 13];
        client.read_exact(&mut got).unwrap();
        if victim == "near" {
            pair.near.kill()
        } else {
            pair.far.kill()
        }
        ends_with_reset(&mut client);
        ends_with_reset(&mut server);
    }
}

#[test]
fn a_reset_is_passed_on_both_ways() {
    let pair = BridgePair::new();
    for from_client in [true, false] {
        let (mut client, mut server) = pair.connected();
        client.write_all(b"something").unwrap();
        let mut got = [0; 9];
        server.read_exact(&mut got).unwrap();
        let (victim, mut other) = if from_client { (client, server) } else { (server, client) };
        socket2::SockRef::from(&victim).set_linger(Some(Duration::ZERO)).unwrap();
        drop(victim);
        ends_with_reset(&mut other);
    }
    eventually("the connections are over", || pair.far.metric("tonic_rdma_bridge_connections{") == 0.0);
}

/// Stock clients often close with unread data, which resets the connection.
#[test]
fn a_client_that_leaves_with_unread_data_is_no_failure() {
    const CLIENTS: f64 = 5.0;
    let pair = BridgePair::new();
    let failed = |reason: &str| {
        let label = format!("reason=\"{reason}\"");
        let count = |bridge: &Bridge| bridge.metric_of("connections_failed_total{", &label);
        (count(&pair.near), count(&pair.far))
    };
    for _ in 0..CLIENTS as usize {
        let (client, mut server) = pair.connected();
        server.write_all(b"good bye").unwrap();
        assert_eq!(client.peek(&mut [0; 8]).unwrap(), 8);
        drop(client);
        ends_with_reset(&mut server);
    }
    eventually("resets are counted", || failed("reset") == (CLIENTS, CLIENTS));
    // The target resets after the client's end.
    let (mut client, mut server) = pair.connected();
    client.write_all(b"last words").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    let mut heard = Vec::new();
    server.read_to_end(&mut heard).unwrap();
    assert_eq!(heard, b"last words");
    socket2::SockRef::from(&server).set_linger(Some(Duration::ZERO)).unwrap();
    drop(server);
    ends_with_reset(&mut client);
    eventually("one more", || failed("reset") == (CLIENTS + 1.0, CLIENTS + 1.0));
    assert_eq!(failed("broken"), (0.0, 0.0));
    for bridge in [&pair.near, &pair.far] {
        let log = bridge.log();
        assert!(!log.contains("WARN") && !log.contains("connection reset"), "{log}");
    }

    // A reset by the target before that is a failure.
    let (mut client, server) = pair.connected();
    socket2::SockRef::from(&server).set_linger(Some(Duration::ZERO)).unwrap();
    drop(server);
    ends_with_reset(&mut client);
    eventually("it is counted", || failed("broken") == (1.0, 1.0));
    pair.near.logs("connection reset");
    pair.far.logs("connection reset");
}

#[test]
fn tcp_only_sends_the_bytes_over_tcp_and_require_fails() {
    let server = spawn_echo("127.0.0.1:0");
    let target = format!("tcp://{server}");
    // Bytes of no protocol, and the first bytes of HTTP/2, SSH and TLS.
    let beginnings: [&[u8]; 4] = [b"\0\x01\x02", b"PRI * HTTP/2.0\r\n\r\n", b"SSH-2.0-x\r\n", b"\x16"];
    for (near, far) in [("prefer", "tcp-only"), ("tcp-only", "prefer"), ("tcp-only", "tcp-only")] {
        let far = Bridge::start("rdma://127.0.0.1:0", &target, &["--policy", far]);
        let near = Bridge::start("tcp://127.0.0.1:0", &far.address, &["--policy", near]);
        for beginning in beginnings {
            let sent = [beginning, &content(100_000, 5)].concat();
            assert!(exchange(near.connect(), &sent).unwrap() == sent);
        }
        assert!(far.metric("client=\"tcp\"") > 0.0);
    }
    let far = Bridge::start("rdma://127.0.0.1:0", &target, &["--policy", "tcp-only"]);
    // Enough time for a refused attempt, even on an emulated processor.
    let near =
        Bridge::start("tcp://127.0.0.1:0", &far.address, &["--policy", "require", "--connect-timeout", "3"]);
    ends_with_reset(&mut near.connect());
    near.logs("RDMA is required");
}

#[test]
fn a_killed_bridge_resets_both_ends_without_rdma() {
    let (server, sink) = spawn_sink();
    let mut far = Bridge::start("rdma://127.0.0.1:0", &format!("tcp://{server}"), &["--policy", "tcp-only"]);
    let near = Bridge::start("tcp://127.0.0.1:0", &far.address, &[]);
    let mut client = near.connect();
    client.write_all(b"x").unwrap();
    let mut server = first_that_sends(&sink);
    far.kill();
    ends_with_reset(&mut client);
    ends_with_reset(&mut server);
}

#[test]
fn a_target_that_starts_late_is_connected_to() {
    let reserved = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = reserved.local_addr().unwrap();
    drop(reserved);
    let bridge = Bridge::start("tcp://127.0.0.1:0", &format!("tcp://{address}"), &[]);
    bridge.logs("the target is not there yet");
    let client = bridge.connect();
    let exchanged = std::thread::spawn(move || exchange(client, b"patience"));
    eventually("it dials again", || bridge.metric("tonic_rdma_bridge_dial_retries_total") >= 1.0);
    spawn_echo(&address.to_string());
    assert_eq!(exchanged.join().unwrap().unwrap(), b"patience");
}

#[test]
fn clients_of_an_unreachable_target_are_reset() {
    let address = "tcp://127.0.0.1:1";
    let bridge = Bridge::start("tcp://127.0.0.1:0", address, &["--connect-timeout", "0.4"]);
    let mut clients: Vec<_> = (0..40).map(|_| bridge.connect()).collect();
    clients.iter_mut().for_each(ends_with_reset);
    bridge.logs("target unreachable: no connection within 400ms");
    let attempts = bridge.metric("tonic_rdma_bridge_dial_failures_total");
    assert!((40.0..1000.0).contains(&attempts), "{attempts} attempts");
    let output = stopped(&[
        "--listen",
        "tcp://127.0.0.1:0",
        "--connect",
        address,
        "--connect-timeout",
        "0.2",
        "--require-target",
    ]);
    assert!(output.contains("--require-target") && output.contains("127.0.0.1:1"), "{output}");
}

#[test]
fn a_busy_target_delays_only_its_own_clients() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("busy").display().to_string();
    let name = format!("tonic-rdma-busy-{}", std::process::id());
    let server = format!("tcp://{}", spawn_echo("127.0.0.1:0"));
    let listen = ["--listen", "tcp://127.0.0.1:0", "--connect"];
    for (address, name) in [(format!("unix:@{name}"), format!("\0{name}")), (format!("unix:{path}"), path)] {
        let busy = Busy::new(&name);
        let bridge = Bridge::start("tcp://127.0.0.1:0", &address, &["--connect-timeout", "0.4"]);
        ends_with_reset(&mut bridge.connect());
        bridge.logs("the target does not accept connections: its queue is full");
        let required = [&listen[..], &[&address, "--require-target", "--connect-timeout", "0.2"]].concat();
        let said = stopped(&required);
        assert!(said.contains("--require-target is set") && said.contains("its queue is full"), "{said}");
        // A socket that a busy process listens on is not replaced.
        if address == format!("unix:{name}") {
            let said = stopped(&["--listen", &address, "--connect", &server]);
            assert!(said.contains("another process listens there"), "{said}");
        }

        // A client waits until the target accepts it, and other routes go on meanwhile.
        let more = [&listen[..], &[&server, "--connect-timeout", "3600"]].concat();
        let bridge = Bridge::start("tcp://127.0.0.1:0", &address, &more);
        let mut client = bridge.connect();
        client.write_all(b"patience").unwrap();
        eventually("an attempt fails", || bridge.metric("tonic_rdma_bridge_dial_failures_total") >= 1.0);
        let other = TcpStream::connect(bridge.another_route().trim_start_matches("tcp://")).unwrap();
        assert_eq!(exchange(other, b"beside").unwrap(), b"beside", "{address}");
        assert!(bridge.http("GET /healthz").starts_with("HTTP/1.1 200"), "{address}");
        let mut heard = [0; 8];
        busy.accept().read_exact(&mut heard).unwrap();
        assert_eq!(&heard, b"patience", "{address}");
    }
}

#[test]
fn the_first_signal_drains_and_the_second_signal_resets() {
    let mut pair = BridgePair::new();
    let (mut client, mut server) = pair.connected();
    pair.near.signal("TERM");
    // Before this line the bridge still accepts clients, which would count as connections.
    pair.near.logs("draining");
    eventually("the port is closed", || {
        TcpStream::connect(pair.near.address.trim_start_matches("tcp://")).is_err()
    });
    // The connection still carries bytes.
    client.write_all(b"still here").unwrap();
    let mut got = [0; 10];
    server.read_exact(&mut got).unwrap();
    drop(client);
    drop(server);
    assert_eq!(pair.near.ended(), Some(0));

    let mut pair = BridgePair::new();
    let (mut client, _server) = pair.connected();
    pair.near.signal("TERM");
    // Before this line the bridge still accepts clients, which would count as connections.
    pair.near.logs("draining");
    eventually("the port is closed", || {
        TcpStream::connect(pair.near.address.trim_start_matches("tcp://")).is_err()
    });
    pair.near.signal("INT");
    ends_with_reset(&mut client);
    assert_eq!(pair.near.ended(), Some(1));
    pair.near.logs("1 connection had not ended");
}

#[test]
fn draining_ends_at_its_timeout() {
    let server = spawn_echo("127.0.0.1:0");
    let mut bridge =
        Bridge::start("tcp://127.0.0.1:0", &format!("tcp://{server}"), &["--drain-timeout", "0.3"]);
    let mut client = bridge.connect();
    client.write_all(b"x").unwrap();
    client.read_exact(&mut [0]).unwrap();
    bridge.signal("TERM");
    ends_with_reset(&mut client);
    assert_eq!(bridge.ended(), Some(1));
}

#[test]
fn the_service_manager_is_notified() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notify");
    let manager = std::os::unix::net::UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(TIMEOUT)).unwrap();
    let server = spawn_echo("127.0.0.1:0");
    let bridge = Bridge::start_with(
        "tcp://127.0.0.1:0",
        &format!("tcp://{server}"),
        &[],
        &[("NOTIFY_SOCKET", path.to_str().unwrap())],
    );
    let mut said = [0; 64];
    let count = manager.recv(&mut said).unwrap();
    assert_eq!(&said[..count].trim_ascii(), b"READY=1");
    bridge.signal("TERM");
    let count = manager.recv(&mut said).unwrap();
    assert_eq!(&said[..count].trim_ascii(), b"STOPPING=1");
}

#[test]
fn a_stale_socket_is_replaced_and_other_files_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let (server, path) = (spawn_echo("127.0.0.1:0"), folder.path().join("socket"));
    let (listen, target) = (format!("unix:{}", path.display()), format!("tcp://{server}"));
    let mut first = Bridge::start(&listen, &target, &[]);
    let refused = |why: &str| {
        let said = stopped(&["--listen", &listen, "--connect", &target]);
        assert!(said.contains(why) && said.contains("socket"), "{said}");
    };
    refused("another process listens there");
    first.kill();
    assert!(path.exists());
    let second = Bridge::start(&listen, &target, &[]);
    second.logs("replacing a socket that no process listens on");
    UnixStream::connect(&path).unwrap();
    drop(second);
    std::fs::write(&path, "precious").unwrap();
    refused("a file of another kind");
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
}

#[test]
fn clients_beyond_the_limit_wait() {
    let server = spawn_echo("127.0.0.1:0");
    let bridge = Bridge::start("tcp://127.0.0.1:0", &format!("tcp://{server}"), &["--max-connections", "2"]);
    let mut clients: Vec<_> = (0..3).map(|_| bridge.connect()).collect();
    for client in &mut clients {
        client.write_all(b"x").unwrap();
    }
    clients[0].read_exact(&mut [0]).unwrap();
    clients[1].read_exact(&mut [0]).unwrap();
    clients[2].set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    assert!(clients[2].read_exact(&mut [0]).is_err(), "a third was served");
    drop(clients.remove(0));
    prepare(&clients[1]);
    clients[1].read_exact(&mut [0]).unwrap();
}

#[test]
fn health_and_unknown_pages_are_answered() {
    let server = spawn_echo("127.0.0.1:0");
    let bridge = Bridge::start("tcp://127.0.0.1:0", &format!("tcp://{server}"), &[]);
    let _open = bridge.connect();
    assert!(bridge.http("GET /healthz").starts_with("HTTP/1.1 200"));
    assert!(bridge.http("GET /ready").starts_with("HTTP/1.1 200"));
    assert!(bridge.http("GET /nowhere").starts_with("HTTP/1.1 404"));
    assert!(bridge.http("DELETE /metrics").starts_with("HTTP/1.1 405"));
    eventually("the connection counts", || bridge.metric("tonic_rdma_bridge_connections{") == 1.0);
    bridge.signal("TERM");
    eventually("it is not ready", || bridge.http("GET /ready").starts_with("HTTP/1.1 503"));
}

#[test]
fn an_idle_bridge_uses_little_cpu_time() {
    let pair = BridgePair::new();
    let _idle = pair.connected();
    std::thread::sleep(Duration::from_millis(500));
    let (before, since) = (pair.near.cpu_ticks(), Instant::now());
    std::thread::sleep(Duration::from_secs(2));
    let ticks = pair.near.cpu_ticks() - before;
    // A busy loop would take all of them.
    assert!(ticks < 50, "{ticks} hundredths of a second in {:?}", since.elapsed());
}

#[test]
fn bad_input_is_named() {
    for (arguments, named) in [
        (
            &["--listen", "quic://a:1", "--connect", "tcp://a:1"][..],
            &["quic", "--listen", "tcp://HOST:PORT"][..],
        ),
        (
            &["--listen", "tcp://a:1", "--connect", "localhost:1"],
            &["--connect", "localhost:1", "rdma://HOST:PORT"],
        ),
        (&["--listen", "tcp://127.0.0.1:0", "--connect", "tcp://127.0.0.1:0"], &["--connect", "port 0"]),
        (&["--listen", "tcp://127.0.0.1:0"], &["--connect"]),
        (
            &["--listen", "tcp://127.0.0.1:0", "--listen", "tcp://127.0.0.1:0", "--connect", "tcp://a:1"],
            &["--listen is given 2 times", "--connect 1 times"],
        ),
        (&["--listen", "tcp://192.0.2.1:1", "--connect", "tcp://a:1"], &["192.0.2.1:1", "no interface"]),
        (&["--listen", "unix:/no/such/folder/x", "--connect", "tcp://a:1"], &["/no/such/folder/x"]),
        (
            &["--listen", "tcp://127.0.0.1:0", "--connect", "tcp://a:1", "--policy", "maybe"],
            &["maybe", "require"],
        ),
        (&["--listen", "tcp://127.0.0.1:0", "--connect", "tcp://a:1", "--log", "a=b=c"], &["--log", "a=b=c"]),
        (
            &["--listen", "tcp://127.0.0.1:0", "--connect", "tcp://a:1", "--metrics", "here"],
            &["--metrics", "here"],
        ),
        (
            &["--listen", "tcp://127.0.0.1:0", "--connect", "tcp://a:1", "--max-connections", "0"],
            &["--max-connections"],
        ),
    ] {
        let said = stopped(arguments);
        for name in named {
            assert!(said.contains(name), "{arguments:?}: {name:?} is not named in {said}");
        }
    }
}

/// Sends `BRIDGE_SOAK_MIB` in each direction over several connections. The run in CI is short;
/// `BRIDGE_SOAK_MIB=10240` is 10 GiB.
#[test]
fn no_byte_is_lost_or_moved() {
    let mib: usize =
        std::env::var("BRIDGE_SOAK_MIB").map_or(128, |text| text.parse().expect("BRIDGE_SOAK_MIB"));
    const CONNECTIONS: usize = 4;
    let pair = BridgePair::new();
    let begun = Instant::now();
    let threads: Vec<_> = (0..CONNECTIONS)
        .map(|index| {
            let (client, server) = pair.connected();
            let each = (mib << 20) / CONNECTIONS;
            let seed = index as u64;
            let way = |from: &TcpStream, to: &TcpStream, seed| {
                let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                let sender = std::thread::spawn(move || bridge_processes::send(&mut from, each, seed));
                let receiver = std::thread::spawn(move || bridge_processes::receive(&mut to));
                (sender, receiver)
            };
            let ways = [way(&client, &server, seed), way(&server, &client, !seed)];
            (index, each, ways)
        })
        .collect();
    for (index, each, ways) in threads {
        for (sender, receiver) in ways {
            let sent = sender.join().unwrap();
            let got = receiver.join().unwrap();
            assert_eq!(got, (each, sent), "connection {index}");
        }
    }
    eprintln!("{mib} MiB each way in {:?}", begun.elapsed());
}
