//! Runs over hosts that serve.

use std::io::{BufRead as _, BufReader};
use std::process::Child;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::processes::kill;
use crate::{TIMEOUT, command, file, onnx, run, stderr};

/// The hosts of a test: `ADDRESS=DEVICE` for each, separated by commas. Without it, both are this machine
/// with any device.
const HOSTS: &str = "RDMA_TEST_HOSTS";

/// A process that serves as a host.
struct Host(Child, String);

impl Host {
    /// Starts a host at an address, with the RDMA device of this name if there is one.
    fn start(address: &str, device: Option<&str>) -> Self {
        let mut command = command(&["serve", "--listen", &format!("{address}:0")]);
        command.envs(device.map(|device| ("RDMA_DEVICE", device)));
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim_end().strip_prefix("listening on ").expect("an address").to_owned();
        Self(child, address)
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[test]
fn hosts_serve_one_run_after_the_other() {
    let (_folder, path) = file(&onnx::convolutions());
    let hosts = [Host::start("127.0.0.1", None), Host::start("127.0.0.1", None)];
    let list = format!("{},{}", hosts[0].1, hosts[1].1);
    let model = path.to_str().unwrap();
    for mode in ["grpc-tcp,rdma-zerocp", "rdma-cp"] {
        let output = run(&[model, "--hosts", &list, "--mode", mode, "--steps", "2"]);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    }
    // A part that is killed has no process on this machine, as far as the command knows.
    let mut parent = command(&[model, "--hosts", &list, "--steps", "1000000"]).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(1500));
    kill(hosts[1].0.id());
    let end = Instant::now() + TIMEOUT;
    while parent.try_wait().unwrap().is_none() {
        assert!(Instant::now() < end, "the command goes on without part 1");
        std::thread::sleep(Duration::from_millis(5));
    }
    let output = parent.wait_with_output().unwrap();
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("part 1"), "{text}");
}

/// `interop/real-verbs graph` runs this test over Soft-RoCE, each host with its device.
#[test]
fn two_hosts_give_what_the_unsplit_model_gives_in_all_modes_with_rdma() {
    let described = std::env::var(HOSTS).unwrap_or_else(|_| "127.0.0.1,127.0.0.1".to_owned());
    let hosts: Vec<Host> = described
        .split(',')
        .map(|host| match host.split_once('=') {
            Some((address, device)) => Host::start(address, Some(device)),
            None => Host::start(host, None),
        })
        .collect();
    let list: Vec<&str> = hosts.iter().map(|host| &*host.1).collect();
    let (folder, path) = file(&onnx::convolutions());
    let json = folder.path().join("rows.json");
    let modes = ["grpc-rdma", "rdma-cp", "rdma-zerocp"];
    // Static slots, then dynamic ones.
    for symbol in [&[][..], &["--symbol", "image:0=N", "--lengths", "3,1"]] {
        let (list, modes, json) = (list.join(","), modes.join(","), json.to_str().unwrap());
        let mut arguments = vec![path.to_str().unwrap(), "--hosts", &list, "--mode", &modes, "--steps", "1"];
        arguments.extend(["--json", json]);
        arguments.extend(symbol);
        let output = run(&arguments);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        let results: Value = serde_json::from_str(&std::fs::read_to_string(json).unwrap()).unwrap();
        for row in results["modes"].as_array().unwrap() {
            assert!(row["errors"] == 0 && row["checked"].as_u64().unwrap() > 0, "{row}");
        }
        let placement = if symbol.is_empty() { "static" } else { "dynamic" };
        let tensors = results["tensors"].as_array().unwrap();
        assert!(!tensors.is_empty());
        for tensor in tensors {
            let found = (&tensor["placement"], &tensor["sender_copies"]);
            assert_eq!(found, (&Value::from(placement), &Value::from(0)), "{tensor}");
        }
    }
}
