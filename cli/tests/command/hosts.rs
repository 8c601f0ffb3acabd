//! `compare` and `parameter-server` between two ends, `--listen` and `--server`, which are processes of this
//! host here: the rows and the first lines, the only seat, limits, and what is refused.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;
use tonic_rdma_commands::process::Signal;

use super::listening::Listening;
use super::process::{is_gone, refused, run, tonic_rdma, wait_for};

/// The modes between two hosts.
const MODES: [&str; 10] = [
    "grpc-tcp",
    "grpc-tcp-busy",
    "grpc-tcp-tuned",
    "grpc-rdma",
    "grpc-rdma-gather",
    "grpc-native",
    "grpc-native-gather",
    "rdma-cp",
    "rdma-zerocp",
    "rdma-zerocp-await",
];

/// A short comparison.
const SHORT: [&str; 4] = ["--sizes", "64,100KiB", "--duration", "0.05"];

/// Longest wait for a line or an end. Only a test that hangs takes as long.
const LIMIT: Duration = Duration::from_secs(60);

impl Listening {
    fn start(command: &str, arguments: &[&str]) -> Self {
        Self::ready(tonic_rdma(&[&[command, "--listen", "127.0.0.1:0"], arguments].concat()))
    }

    /// Sends a signal, at which it ends in order.
    fn end_by(&self, signal: Signal) {
        self.process.signal(signal).unwrap();
        assert!(self.process.wait(LIMIT).is_some_and(|status| status.success()));
    }

    /// Sends the first line of a caller. Returns the answer, and the connection.
    fn greet(&self, program: &str, version: &str) -> (Value, TcpStream) {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        writeln!(stream, r#"{{"program":"{program}","version":"{version}","facts":{{"text":"a test"}}}}"#)
            .unwrap();
        // Not more than the line: signs of life follow.
        let (mut answer, mut byte) = (Vec::new(), [0]);
        while byte != [b'\n'] {
            stream.read_exact(&mut byte).unwrap();
            answer.extend(byte);
        }
        let answer = String::from_utf8(answer).unwrap();
        (serde_json::from_str(&answer).unwrap_or_else(|_| panic!("{answer}")), stream)
    }

    fn take_the_seat(&self) -> TcpStream {
        let (answer, stream) = self.greet("tonic-rdma compare", env!("CARGO_PKG_VERSION"));
        assert!(answer["welcome"]["clock"].is_u64(), "{answer}");
        stream
    }

    /// Makes a run of `command` that must succeed. Returns its JSON and its output.
    fn measured_by(&self, command: &str, arguments: &[&str]) -> (Value, String) {
        let folder = tempfile::tempdir().unwrap();
        let json = folder.path().join("rows.json");
        let ends = [command, "--server", &self.address, "--json", json.to_str().unwrap()];
        let output = run(&[&ends[..], arguments].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let written = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
        (written, String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

#[test]
fn all_modes_are_measured_between_two_ends() {
    let mut server = Listening::start("compare", &["--provider", "soft"]);
    // Each run has a server process of its own, and the seat is that of one caller.
    let (written, printed) = server.measured_by("compare", &[&SHORT[..], &["--runs", "2"]].concat());
    assert_eq!((&written["provider"], &written["checks"]["mismatches"]), (&"soft".into(), &0.into()));
    let rows = written["rows"].as_array().unwrap();
    assert_eq!(rows.len(), MODES.len() * 2);
    for row in rows {
        assert!(MODES.contains(&row["mode"].as_str().unwrap()), "{row}");
        for figure in ["ops", "p50_us", "ops_per_s", "gbytes_per_s", "cpu_us_per_op"] {
            assert!(row[figure].as_f64().unwrap() > 0.0, "{figure} in {row}");
        }
        assert_eq!(row["errors"], 0, "{row}");
    }
    let mut first = printed.lines().map(str::trim);
    for (name, said) in [
        ("this end: ", "soft0 (soft"),
        ("other end: ", &server.address),
        ("clocks: ", "the clock of one end"),
    ] {
        let line = first.next().unwrap();
        assert!(line.starts_with(name) && line.contains(said), "{line}");
    }
    assert!(printed.contains("not measured: grpc-uds"), "{printed}");
    assert!(written["ends"]["clock"]["within"].as_f64() > Some(0.0), "{}", written["ends"]);
    for end in ["client", "server"] {
        assert_eq!(written["ends"][end]["version"], env!("CARGO_PKG_VERSION"));
    }
    server.says(" calls: tonic-rdma compare ");
    for _ in 0..2 {
        server.says("starts the server process: grpc-tcp, ");
    }
    server.says(" has left after ");
    // The next caller gets the seat.
    server.measured_by(
        "compare",
        &[&["--modes", "grpc-tcp,rdma-zerocp", "--direction", "up"], &SHORT[..]].concat(),
    );
    let down = ["--modes", "grpc-tcp,grpc-native", "--direction", "down"];
    server.measured_by("compare", &[&down[..], &SHORT].concat());
}

#[test]
fn a_second_caller_is_refused_at_once_and_a_caller_that_dies_frees_the_seat() {
    let mut server = Listening::start("compare", &[]);
    let address = server.address.clone();
    let run_on =
        ["compare", "--server", &address, "--modes", "grpc-tcp", "--sizes", "64", "--duration", "30"];
    let mut first = tonic_rdma(&run_on).stdout(Stdio::null()).spawn().unwrap();
    server.says("starts the server process: grpc-tcp at 64 B");
    let second = run(&run_on);
    refused(&second, 1, &[&server.address, "busy with 127.0.0.1:", "one caller at a time"]);
    first.kill().unwrap();
    first.wait().unwrap();
    server.says(" has left after ");
    server.measured_by("compare", &[&["--modes", "grpc-tcp"], &SHORT[..]].concat());
}

#[test]
fn a_silent_caller_frees_the_seat_and_its_processes() {
    let mut server = Listening::start("compare", &[]);
    let stream = server.take_the_seat();
    // It neither tells anything nor closes the connection.
    let left = server.says(" has left after ");
    assert!(left.contains("it said nothing for 15 s"), "{left}");
    drop(stream);
    drop(server.take_the_seat());
}

#[test]
fn a_server_that_ends_in_the_middle_ends_the_run_with_the_reason() {
    let mut server = Listening::start("compare", &[]);
    let address = server.address.clone();
    let run_on =
        ["compare", "--server", &address, "--modes", "grpc-tcp", "--sizes", "64", "--duration", "30"];
    let caller = tonic_rdma(&run_on).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    server.says("starts the server process");
    server.end_by(Signal::TERM);
    server.says("ended by a signal");
    let output = caller.wait_with_output().unwrap();
    refused(&output, 1, &["server process"]);
}

#[test]
fn signals_end_the_listening_end_and_its_children() {
    for signal in [Signal::INT, Signal::TERM] {
        let mut server = Listening::start("compare", &[]);
        let address = server.address.clone();
        let run_on =
            ["compare", "--server", &address, "--modes", "grpc-tcp", "--sizes", "64", "--duration", "30"];
        let mut caller = tonic_rdma(&run_on).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        server.says("starts the server process");
        let parent = server.process.id().unwrap();
        let child = wait_for("no server process", || {
            let children = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).ok()?;
            children.split_whitespace().next()?.parse().ok()
        });
        server.end_by(signal);
        wait_for("the server process outlives the listening end", || is_gone(child));
        assert!(!caller.wait().unwrap().success());
    }
}

#[test]
fn a_caller_of_another_kind_or_version_is_told_so() {
    let server = Listening::start("compare", &[]);
    let version = env!("CARGO_PKG_VERSION");
    for (program, theirs, said) in [
        ("tonic-rdma compare", "9.9.9", "the caller 9.9.9: use one version at both ends"),
        ("tonic-rdma parameter-server", version, "this end is tonic-rdma compare --listen"),
    ] {
        let (answer, _) = server.greet(program, theirs);
        assert!(answer["refused"].as_str().is_some_and(|reason| reason.contains(said)), "{answer}");
    }
    let mut stream = TcpStream::connect(&server.address).unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer).unwrap();
    assert!(answer.contains("did not say what it is"), "{answer}");
    // The seat is still free.
    drop(server.take_the_seat());
}

#[test]
fn what_a_caller_may_ask_for_has_limits() {
    let mut server = Listening::start("compare", &["--limit", "64MiB"]);
    let call = |arguments: &[&str]| run(&[&["compare", "--server", &server.address], arguments].concat());
    let refusal = call(&["--modes", "grpc-tcp", "--sizes", "32MiB", "--inflight", "8"]);
    refused(&refusal, 2, &["server process", "--limit of the listening end", "64.0 MiB"]);
    server.says(" has left after ");
    // A caller that is none of ours. Its options are parsed as those of a command line, and it chooses no file
    // and no program.
    let mut stream = server.take_the_seat();
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map(Result::unwrap);
    // 1001 cells.
    let list = |count: u32| (1..=count).map(|item| item.to_string()).collect::<Vec<_>>().join(",");
    let (sizes, calls) = (list(77), list(13));
    let many = format!(
        r#"{{"name":"x","job":{{"arguments":["--sizes","{sizes}","--inflight","{calls}"],"pinned":false}}}}"#
    );
    for (request, said) in [
        (r#"{"name":"x","job":{"arguments":["--sizes","0"],"pinned":false}}"#, "is zero"),
        (r#"{"name":"x","job":{"arguments":["--connections","9"],"pinned":false}}"#, "for one host"),
        (r#"{"name":"x","job":[]}"#, "can't be read"),
        (&many, "at most 1000 cells"),
    ] {
        let request = request.replacen('{', r#"{"child":1,"#, 1);
        writeln!(stream, r#"{{"start":{request}}}"#).unwrap();
        let answer = lines.find(|line| line != r#""alive""#).unwrap();
        assert!(answer.contains("refused") && answer.contains(said), "{answer}");
    }
    drop((stream, lines));
    server.says(" has left after ");
    server.measured_by(
        "compare",
        &[&["--modes", "grpc-tcp,grpc-native,rdma-cp,rdma-dynamic,rdma-named"], &SHORT[..]].concat(),
    );
}

#[test]
fn bad_ends_are_named() {
    for command in ["compare", "parameter-server"] {
        refused(&run(&[command, "--listen", "nowhere"]), 2, &["--listen", "\"nowhere\"", "HOST:PORT"]);
        refused(&run(&[command, "--server", "nowhere"]), 2, &["--server", "\"nowhere\"", "HOST:PORT"]);
        refused(&run(&[command, "--listen", "a:1", "--server", "b:1"]), 2, &["--listen", "--server"]);
        refused(&run(&[command, "--listen", "a:1", "--modes", "grpc-tcp"]), 2, &["--listen", "--modes"]);
        refused(&run(&[command, "--limit", "1GiB"]), 2, &["--listen"]);
        let little = run(&[command, "--listen", "127.0.0.1:0", "--limit", "1023KiB"]);
        refused(&little, 2, &["--limit", "less than 1MiB"]);
        refused(&run(&[command, "--server", "127.0.0.1:1"]), 1, &["can't connect to 127.0.0.1:1"]);
    }
    for only_here in [&["--container"][..], &["--connections", "2"], &["--server-provider", "soft"]] {
        let arguments = [&["compare", "--server", "127.0.0.1:1"], only_here].concat();
        refused(&run(&arguments), 2, &["--server", only_here[0]]);
    }
    let sockets = run(&["compare", "--server", "127.0.0.1:1", "--modes", "grpc-tcp,grpc-uds"]);
    refused(&sockets, 2, &["grpc-uds", "one host"]);
}

#[test]
fn an_address_that_everybody_reaches_is_warned_of() {
    let mut server = tonic_rdma(&["compare", "--listen", "0.0.0.0:0"])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut warning = String::new();
    BufReader::new(server.stderr.take().unwrap()).read_line(&mut warning).unwrap();
    server.kill().unwrap();
    server.wait().unwrap();
    assert!(warning.contains("anybody who reaches it"), "{warning}");
}

#[test]
fn the_servers_of_a_parameter_server_run_at_the_other_end() {
    let mut server = Listening::start("parameter-server", &[]);
    let (written, printed) = server.measured_by(
        "parameter-server",
        &["--models", "gru", "--steps", "1", "--workers", "2", "--servers", "2"],
    );
    let rows = written["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 7);
    for row in rows {
        assert!(row["minibatches_per_s"].as_f64() > Some(0.0), "{row}");
    }
    assert!(printed.trim_start().starts_with("this end: ") && printed.contains("other end: "), "{printed}");
    for number in 0..2 {
        server.says(&format!("starts server process {number}: gru, 2 workers, 2 servers"));
    }
    server.says(" has left after ");
    let server = Listening::start("parameter-server", &["--limit", "1MiB"]);
    let refusal =
        run(&["parameter-server", "--server", &server.address, "--models", "gru", "--workers", "2"]);
    refused(&refusal, 2, &["--limit of the listening end"]);
}
