//! A second process: this test binary, run again in a role.

use std::io::{BufRead, BufReader, Read as _, Write as _};
use std::process::{Child, ChildStdout, Command, Stdio};

pub(crate) const ROLE: &str = "TONIC_RDMA_TEST_ROLE";
const MARK: &str = "child says:";

/// A child process in its role; killed on drop.
pub(crate) struct Peer {
    pub(crate) process: Child,
    /// What it said first.
    pub(crate) word: String,
    /// Kept open: what else it writes must not fail.
    _output: BufReader<ChildStdout>,
}

impl Peer {
    /// Starts this binary in `role`, which its test `child::role` takes up, by way of `wrapper` (such as `ip netns exec NAME`), and waits for its word.
    pub(crate) fn start(wrapper: &[&str], role: &str) -> Self {
        Self::start_test("child::role", wrapper, role)
    }

    /// Does the same with another test in place of `child::role`.
    pub(crate) fn start_test(test: &str, wrapper: &[&str], role: &str) -> Self {
        let binary = std::env::current_exe().unwrap();
        let mut command = match wrapper {
            [] => Command::new(&binary),
            [program, arguments @ ..] => {
                let mut command = Command::new(program);
                command.args(arguments).arg(&binary);
                command
            }
        };
        command.args(["--exact", test, "--nocapture", "--test-threads=1"]);
        let mut process =
            command.env(ROLE, role).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut output = BufReader::new(process.stdout.take().unwrap());
        let word = output
            .by_ref()
            .lines()
            .map_while(Result::ok)
            .find_map(|line| line.split_once(MARK).map(|(_, word)| word.trim().to_owned()))
            .expect("the child ended without a word");
        Self { process, word, _output: output }
    }
}

impl Peer {
    /// Closes its stdin, and waits until it has ended by itself; panics if it ended with an error.
    #[allow(dead_code, reason = "each test crate uses its part")]
    pub(crate) fn ends(mut self) {
        drop(self.process.stdin.take());
        let status = self.process.wait().unwrap();
        assert!(status.success(), "{status}");
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Says a word to the parent.
pub(crate) fn say(word: impl std::fmt::Display) {
    println!("{MARK} {word}");
    std::io::stdout().flush().unwrap();
}
