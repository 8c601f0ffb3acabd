//! Help, and the message for each kind of bad input.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;

use super::process::{refused, run, tonic_rdma};

#[test]
fn bad_input_is_named_in_one_line() {
    for (arguments, named) in [
        (&["compare", "--quik"][..], &["--quik", "--quick"][..]),
        (&["compre"], &["compre", "did you mean compare?"]),
        (&["compare", "--mode", "grpc-tcp"], &["--mode", "did you mean --modes?"]),
        (&["bridge"], &["not provided: --listen <ADDR> --connect <ADDR>"]),
        (
            &["bridge", "--listen", "tcp://a:1", "--connect", "tcp://a:1", "--policy", "requre"],
            &["did you mean require? accepted: require, prefer, tcp-only"],
        ),
        (
            &["bridge", "--listen", "tcp://a:1", "--connect", "tcp://a:1", "--log", "nosuch"],
            &["--log nosuch", "error, warn, info, debug, trace, off", "target=level"],
        ),
        (&["compare", "--modes", "grpc-quic"], &["grpc-quic", "grpc-tcp-shared, grpc-uds, grpc-rdma"]),
        (&["compare", "--modes", "grpc-tcp,grpc-tcp"], &["grpc-tcp", "twice"]),
        (&["compare", "--modes", ""], &["--modes", "empty"]),
        (&["compare", "--sizes", "4 lots"], &["4 lots", "64k, 4KiB"]),
        (&["compare", "--sizes", "0"], &["zero"]),
        (&["compare", "--sizes", "9999999999999999999999"], &["9999999999999999999999"]),
        (&["compare", "--inflight", "many"], &["many", "whole numbers"]),
        (&["compare", "--inflight", "0"], &["--inflight", "\"0\"", "from 1 to 16384"]),
        (&["compare", "--inflight", "+1"], &["\"+1\"", "from 1"]),
        (&["compare", "--inflight", "99999999999999999999"], &["99999999999999999999", "from 1"]),
        (&["compare", "--sizes", "184467440737095516159"], &["184467440737095516159", "64 bits"]),
        (&["compare", "--sizes", "0.4"], &["0.4", "fraction of a byte"]),
        (&["compare", "--duration", "18446744073709551615s 1000ms"], &["18446744073709551615s", "300ms"]),
        (&["compare", "--duration", "-1"], &["--duration", "bad time \"-1\""]),
        (&["compare", "--duration", "5 days"], &["5 days", "seconds from 0.001 to 3600", "300ms"]),
        (&["compare", "--http2", "fast"], &["default, tuned"]),
        (&["compare", "--provider", "mlx5_9"], &["mlx5_9", "auto, soft"]),
        (&["compare", "--json", "/no/such/folder/x.json"], &["--json", "/no/such/folder/x.json"]),
        (&["compare", "--consume", "all"], &["all", "auto", "reduce-max", "none"]),
        (
            &["compare", "--sizes", "3GiB", "--modes", "grpc-tcp,grpc-rdma"],
            &["3 GiB", "grpc-tcp", "2047 MiB", "rdma-zerocp-await, rdma-dynamic, rdma-named, memcpy"],
        ),
        (
            &["compare", "--sizes", "1GiB", "--inflight", "10000"],
            &["1 GiB × 10000 needs about", "are available"],
        ),
        (
            &["compare", "--sizes", "1000GiB", "--modes", "memcpy"],
            &["1000 GiB × 1 needs about", "are available"],
        ),
        (&["compare", "--encode", "zip"], &["zip", "copy", "gather"]),
        (
            &["compare", "--workload", "resnet"],
            &["resnet", "uniform, random, skew, resnet50", "vgg16", "blocks"],
        ),
        (&["compare", "--workload", "skew,skew"], &["skew", "twice"]),
        (&["compare", "--workload", ""], &["--workload", "empty"]),
        (&["compare", "--connections", "0"], &["--connections", "\"0\"", "1 to 10000"]),
        (&["compare", "--connections", "10001"], &["--connections", "\"10001\"", "1 to 10000"]),
        (&["compare", "--connections", "1.5"], &["--connections", "\"1.5\"", "1 to 10000"]),
        (&["compare", "--connections", "2", "--rate", "100"], &["--connections", "--rate"]),
        (&["compare", "--connections", "2", "--runs", "3"], &["--connections", "--runs"]),
        (&["compare", "--runs", "0"], &["--runs", "bad number of runs \"0\"", "from 1 to 99"]),
        (&["compare", "--runs", "100"], &["--runs", "\"100\"", "from 1 to 99"]),
        (
            &["compare", "--connections", "2", "--modes", "rdma-cp"],
            &["--connections can't measure rdma-cp", "grpc-native"],
        ),
        (&["compare", "--rate", "fast"], &["fast", "0.1 to 1000000"]),
        (&["compare", "--rate", "0"], &["--rate", "0.1 to 1000000"]),
        (
            &["measure"],
            &["measure", "compare, diff, parameter-server, call, load, bridge, devices, probe, tune"],
        ),
        (&["tune", "--device", "mlx5_9"], &["mlx5_9", "soft0"]),
        (&["tune", "--json", "/no/such/folder/x.json"], &["--json", "/no/such/folder/x.json"]),
        (&["tune", "--slow"], &["--slow", "--device, --json"]),
        (&["devices", "--all"], &["--all", "--json"]),
        (&["devices", "extra"], &["extra", "--check, --json"]),
        (&["devices", "--json", "/no/such/folder/x.json"], &["--json", "/no/such/folder/x.json"]),
        (&["compare", "127.0.0.1"], &["did you mean --server 127.0.0.1:PORT?"]),
        (&["compare", "--duration", "nan"], &["bad time \"nan\"", "from 0.001 to 3600"]),
        (&["compare", "--duration", "-5s"], &["-5", "no number, size or time is negative"]),
        (&["compare", "--rate", "NaN"], &["\"NaN\"", "0.1 to 1000000"]),
        (&["compare", "--rate", "1e400"], &["\"1e400\"", "0.1 to 1000000"]),
        (&["compare", "--sizes", ""], &["--sizes", "the list is empty"]),
        (&["compare", "--sizes", "64,,128"], &["an item of the list is empty"]),
        (&["compare", "--sizes", "-64"], &["bad size \"-64\"", "64k, 4KiB"]),
        (&["compare", "--inflight", "-1"], &["\"-1\"", "from 1 to 16384"]),
        (&["compare", "--at-least", "zero"], &["bad ratio \"zero\"", "0.01 to 1000"]),
        (&["compare", "--listen", "nonsense"], &["--listen: \"nonsense\" is no HOST:PORT"]),
        (&["compare", "--server", "10.0.0.1"], &["--server: \"10.0.0.1\" is no HOST:PORT"]),
        (&["compare", "--limit", "1MiB"], &["--listen <HOST:PORT>", "`tonic-rdma compare --help`"]),
        (&["compare", "--quick", "--quick"], &["--quick", "multiple times"]),
        (&["compare", "--json", "/tmp"], &["--json: can't write /tmp"]),
        (&["compare-server", "{broken"], &["{broken", "line 1 column 2"]),
        (&["probe"], &["<HOST:PORT>", "`tonic-rdma probe --help` explains"]),
        (&["probe", "--timeout", "-3", "a:1"], &["--timeout", "bad time \"-3\"", "from 0.001"]),
        (&["tune", "--device", ""], &["no device \"\"", "soft0"]),
        (
            &["bridge", "--listen", "tcp://127.0.0.1", "--connect", "tcp://a:1"],
            &["port is missing", "tcp://HOST:PORT"],
        ),
        (
            &["bridge", "--listen", "http://a:1", "--connect", "tcp://a:1"],
            &["unknown scheme \"http\"", "unix:PATH"],
        ),
        (
            &["bridge", "--listen", "tcp://a:1", "--connect", "tcp://a:1", "--threads", "1000"],
            &["1000", "1..=256"],
        ),
        (
            &["bridge", "--listen", "tcp://a:1", "--connect", "tcp://a:1", "--max-connections", "-1"],
            &["-1", "1..=1000000"],
        ),
        (
            &["bridge", "--listen", "tcp://a:1", "--connect", "tcp://a:1", "--connect-timeout", "-5"],
            &["bad time \"-5\"", "from 0.001 to 3600"],
        ),
        (&["parameter-server", "--models", "bert"], &["unknown model \"bert\"", "vgg16"]),
        (&["parameter-server", "--workers", "0"], &["\"0\"", "from 1 to 8"]),
        (&["parameter-server", "--batch", "4"], &["--batch", "--compute wait"]),
        (&["parameter-server", "--compute-scale", "NaN"], &["bad scale \"NaN\"", "0.001 to 100"]),
        (&["--color", "blue", "devices"], &["blue", "auto, always, never"]),
        (&[""], &["unrecognized subcommand ''", "compare, "]),
    ] {
        refused(&run(arguments), 2, named);
    }
}

#[test]
fn arguments_that_are_no_text_are_refused() {
    let no_text = OsStr::from_bytes(b"\xff");
    refused(&tonic_rdma(&[]).arg(no_text).output().unwrap(), 2, &["unrecognized subcommand", "compare, "]);
    refused(&tonic_rdma(&["devices"]).arg(no_text).output().unwrap(), 2, &["unexpected argument", "--json"]);
    let variable = tonic_rdma(&["devices"]).env("RDMA_POLICY", no_text).output().unwrap();
    refused(&variable, 2, &["RDMA_POLICY", "UTF-8"]);
}

#[test]
fn a_bad_variable_is_named() {
    for (name, value, accepted) in [
        ("RDMA_POLL_MODE", "sometimes", "busy, adaptive, event"),
        ("RDMA_EAGER_THRESHOLD", "1 lot", "auto or a size"),
        ("RDMA_PINNED_LIMIT", "8 lots", "a size from 1 MiB"),
        ("RDMA_SPIN_LIMIT", "2s", "a time from 0ns to 1s"),
        ("RDMA_PROVIDER", "card", "auto, soft"),
        ("RDMA_CHUNK_SIZE", "large", "auto or a size from 4 KiB"),
        ("RDMA_POLICY", "requre", "require, prefer, tcp-only"),
        ("RDMA_PINNED_LIMIT", "-1", "a size from 1 MiB to 1 PiB"),
        ("RDMA_PINNED_LIMIT", "1e30", "a size from 1 MiB to 1 PiB"),
        ("RDMA_SPIN_LIMIT", "120 parsecs", "a time from 0ns to 1s"),
        ("RDMA_POLL_CPUS", "1,,2", "CPU numbers below 1024"),
    ] {
        let output = tonic_rdma(&["compare", "--quick"]).env(name, value).output().unwrap();
        refused(&output, 2, &[name, value, accepted]);
    }
}

#[test]
fn sizes_and_times_have_units() {
    for (name, value) in [
        ("RDMA_PINNED_LIMIT", "8GiB"),
        ("RDMA_EAGER_THRESHOLD", "64k"),
        ("RDMA_SPIN_LIMIT", "120us"),
        ("RDMA_HANDSHAKE_TIMEOUT", "5s"),
    ] {
        let output = tonic_rdma(&["devices"]).env(name, value).output().unwrap();
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    }
}

#[test]
fn a_misspelt_variable_and_level_are_named() {
    for (name, value, status, said) in [
        ("RDMA_POLCY", "require", 0, "RDMA_POLCY is not a variable of tonic-rdma; did you mean RDMA_POLICY?"),
        ("RDMA_COLLECTIVE_RNAK", "1", 0, "did you mean RDMA_COLLECTIVE_RANK?"),
        // A variable of earlier revisions.
        ("RDMA_TUNE_CACHE", "off", 0, "RDMA_TUNE_CACHE is not a variable of tonic-rdma"),
        ("RDMA_DEVICE", "mlx5_7", 2, "RDMA_DEVICE=mlx5_7 names no device here; there are: soft0"),
        ("RUST_LOG", "inof", 2, "RUST_LOG=inof: \"inof\" is no level; accepted: error, warn"),
    ] {
        let output = tonic_rdma(&["devices"]).env(name, value).output().unwrap();
        refused(&output, status, &[said]);
    }
    // Kubernetes sets these for a service that is named rdma-ps.
    let links = [("RDMA_PS_SERVICE_PORT", "7000"), ("RDMA_PS_PORT_7000_TCP", "tcp://10.0.0.1:7000")];
    let output = tonic_rdma(&["devices"]).envs(links).output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}

#[test]
fn without_a_command_the_help_is_shown() {
    let output = run(&[]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && output.stdout.is_empty(), "{output:?}");
    for text in
        ["Usage:", "Commands:", "compare", "parameter-server", "bridge", "devices", "tune", "--version"]
    {
        assert!(said.contains(text), "{text:?} is not in {said}");
    }
    assert!(!said.contains("compare-server"), "{said}");
}

#[test]
fn what_fails_at_work_has_status_1() {
    for (arguments, named) in [
        (&["devices", "--json", "/dev/full"][..], "can't write /dev/full"),
        (&["compare", "--server", "127.0.0.1:1"], "can't connect to 127.0.0.1:1"),
        (&["probe", "127.0.0.1:1"], "can't connect to http://127.0.0.1:1"),
        (&["probe", "no-such-host.invalid:1"], "can't connect to http://no-such-host.invalid:1"),
    ] {
        refused(&run(arguments), 1, &[named]);
    }
    let unusable = tonic_rdma(&["devices"]).env("RDMA_SOFT_DIR", "/nonexistent").output().unwrap();
    refused(&unusable, 1, &["no device is usable"]);
}
