//! Child processes: the test binary, started again with a role.

use std::fs::Permissions;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, Stdio};

/// The environment variable that gives a child its role.
pub const ROLE: &str = "TONIC_RDMA_TEST_ROLE";
/// The test that a child runs. Every binary that starts children has a test of this name, which reads
/// [`ROLE`].
const TEST: &str = "child::role";
const MARK: &str = "child says:";

/// A child process in its role. Dropping this value kills the process.
pub struct Child {
    /// The process.
    pub process: std::process::Child,
    /// The first text that it announced.
    pub word: String,
    /// Kept open, because the child's later output must not fail.
    output: BufReader<ChildStdout>,
}

/// A copy of this binary that all users may run. Dropping this removes it.
#[derive(Debug)]
pub struct OpenCopy {
    directory: tempfile::TempDir,
}

impl OpenCopy {
    /// Makes the copy.
    pub fn new() -> Self {
        let copy = Self { directory: tempfile::tempdir().unwrap() };
        std::fs::copy(std::env::current_exe().unwrap(), copy.path()).unwrap();
        for path in [copy.directory.path(), &copy.path()] {
            std::fs::set_permissions(path, Permissions::from_mode(0o755)).unwrap();
        }
        copy
    }

    /// Returns where it is.
    pub fn path(&self) -> PathBuf {
        self.directory.path().join("binary")
    }
}

impl Default for OpenCopy {
    fn default() -> Self {
        Self::new()
    }
}

impl Child {
    /// Starts this binary in `role`, through the command `wrapper` (such as `ip netns exec NAME`) if this is
    /// not empty. Waits for the child's announcement.
    pub fn start(wrapper: &[&str], role: &str) -> Self {
        Self::start_copy(&std::env::current_exe().unwrap(), wrapper, role)
    }

    /// As [`start`](Self::start), with the copy `binary` of this binary.
    pub fn start_copy(binary: &Path, wrapper: &[&str], role: &str) -> Self {
        let mut command = match wrapper {
            [] => Command::new(binary),
            [program, arguments @ ..] => {
                let mut command = Command::new(program);
                command.args(arguments).arg(binary);
                command
            }
        };
        command.args(["--exact", TEST, "--nocapture", "--test-threads=1"]);
        let mut process =
            command.env(ROLE, role).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(process.stdout.take().unwrap());
        let mut child = Self { process, word: String::new(), output };
        child.word = child.next_word();
        child
    }

    /// Waits for the child's next announcement.
    pub fn next_word(&mut self) -> String {
        let mut lines = self.output.by_ref().lines().map_while(Result::ok);
        lines
            .find_map(|line| line.split_once(MARK).map(|(_, word)| word.trim().to_owned()))
            .expect("the child ended before it announced anything")
    }

    /// Writes a line to the child's stdin.
    pub fn tell(&mut self, line: impl std::fmt::Display) {
        writeln!(self.process.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    /// Closes the child's stdin, and waits until the child has ended by itself. Panics if it ended with an
    /// error.
    pub fn ends(mut self) {
        drop(self.process.stdin.take());
        let status = self.process.wait().unwrap();
        assert!(status.success(), "{status}");
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Announces `word` to the parent.
pub fn announce(word: impl std::fmt::Display) {
    println!("{MARK} {word}");
    std::io::stdout().flush().unwrap();
}

/// Runs a test in a process of its own: returns true there. Elsewhere starts this process, waits until the test
/// has passed there, and returns false. `test` is the path of the test with the name of its crate.
pub fn is_alone(test: &str) -> bool {
    is_alone_with(test, &[])
}

/// As [`is_alone`], with these variables in the environment of the process.
pub fn is_alone_with(test: &str, variables: &[(&str, &str)]) -> bool {
    let test = test.split_once("::").map_or(test, |(_, test)| test);
    if std::env::var(ROLE).is_ok_and(|role| role == test) {
        return true;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture", "--test-threads=1"]).env(ROLE, test);
    command.envs(variables.iter().copied());
    let status = command.status().unwrap();
    assert!(status.success(), "{test}, in a process of its own: {status}");
    false
}
