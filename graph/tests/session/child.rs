//! A part in a process of its own: this binary, started again.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child as Process, ChildStdout, Command, Stdio};
use std::sync::Arc;

use tonic_rdma_graph::schedule::ReceiveMode;
use tonic_rdma_graph::transfer::TransferMode;

use crate::chain::{Chain, Checks, bind, config, peering, run};

const ROLE: &str = "TONIC_RDMA_GRAPH_TEST_ROLE";
const MARK: &str = "child says:";

/// A child. Dropping it kills it.
pub(crate) struct Child {
    pub(crate) process: Process,
    /// Where it listens.
    pub(crate) address: String,
    _output: BufReader<ChildStdout>,
}

impl Child {
    /// Starts part `part` of `parts`, which runs `steps` in `mode`.
    pub(crate) fn start(part: usize, parts: usize, mode: TransferMode, window: usize, steps: u64) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "child::role", "--nocapture", "--test-threads=1"]);
        command.env(ROLE, format!("{part} {parts} {mode} {window} {steps}"));
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut output = BufReader::new(process.stdout.take().unwrap());
        let address = loop {
            let mut line = String::new();
            assert_ne!(output.read_line(&mut line).unwrap(), 0, "the child ended too soon");
            if let Some((_, address)) = line.split_once(MARK) {
                break address.trim().to_owned();
            }
        };
        Self { process, address, _output: output }
    }

    /// Tells the child where all parts listen.
    pub(crate) fn connect(&mut self, addresses: &[String]) {
        let input = self.process.stdin.as_mut().unwrap();
        writeln!(input, "{}", addresses.join(" ")).unwrap();
        input.flush().unwrap();
    }

    /// Waits until the child has ended in good order.
    pub(crate) fn ends(mut self) {
        let status = self.process.wait().unwrap();
        assert!(status.success(), "{status}");
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        _ = self.process.kill();
        _ = self.process.wait();
    }
}

/// What a child does. In the process of the tests it does nothing.
#[test]
fn role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let words: Vec<&str> = role.split(' ').collect();
    let number = |word: usize| words[word].parse::<u64>().unwrap();
    let (part, parts, window) = (number(0) as usize, number(1) as usize, number(3) as usize);
    let mode: TransferMode = words[2].parse().unwrap();
    let listener = bind("127.0.0.1:0", config()).unwrap();
    println!("{MARK} {}", listener.address());
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let peers: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
    let chain = Arc::new(Chain::new(parts));
    let session = listener.connect(peering(&chain, part, &peers, &[mode], window)).unwrap();
    let transfers = session.transfers(mode).unwrap();
    let mut executor = chain.executor(session.part(), transfers, window, ReceiveMode::PollingAsync);
    run(&mut executor, 0..number(4), &mut Checks::of(&chain)).unwrap();
    drop(executor);
    session.leave(crate::chain::HANGS);
}
