//! A container for the server process, as another pod of the same node has one: a user, pid, ipc and mount namespace of its own. The
//! network stays that of this process.

use std::path::Path;
use std::process::Command;

use tonic_rdma_commands::Failure;

/// The command of util-linux that makes the namespaces, and its options.
const UNSHARE: &str = "unshare";
const NAMESPACES: [&str; 7] =
    ["--user", "--map-root-user", "--pid", "--ipc", "--mount", "--fork", "--kill-child"];

/// Returns a command that starts `program` in a container of its own. If the command is killed, so is the program.
pub(crate) fn command(program: &Path) -> Command {
    let mut command = Command::new(UNSHARE);
    command.args(NAMESPACES).arg(program);
    command
}

/// Fails if this system makes no containers.
pub(crate) fn check() -> Result<(), Failure> {
    let failed =
        |reason: String| Failure::run(format!("--container: {UNSHARE} makes no namespaces: {reason}"));
    let tried = command(Path::new("true")).output().map_err(|error| failed(error.to_string()))?;
    let said = String::from_utf8_lossy(&tried.stderr);
    if tried.status.success() { Ok(()) } else { Err(failed(said.trim().replace('\n', "; "))) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

    use super::*;

    #[test]
    fn a_container_has_namespaces_of_its_own() {
        if check().is_err() {
            println!("skipped: a new user namespace is not permitted here");
            return;
        }
        let names = ["user", "pid", "ipc", "mnt", "net"].map(|name| format!("/proc/self/ns/{name}"));
        let output = command(Path::new("readlink")).args(&names).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let inside: Vec<&str> = text.lines().collect();
        assert_eq!(inside.len(), names.len());
        for (name, inside) in names.iter().zip(inside) {
            let here = std::fs::read_link(name).unwrap();
            assert_eq!(here == Path::new(inside), name.ends_with("net"), "{name}");
        }
    }
}
