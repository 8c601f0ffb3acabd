//! Bridges between TCP and RDMA, and the check that they used RDMA.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::Command;
use std::time::Duration;

use tonic_rdma_commands::Failure;

use crate::plan::Plan;
use crate::process::{self, RunningProgram};

/// The counter of connections. Its labels are the transports of the two ends.
const CONNECTIONS: &str = "tonic_rdma_bridge_connections_total";

/// A bridge. Dropping it ends the process.
#[derive(Debug)]
pub(crate) struct Bridge {
    running: RunningProgram,
    /// Port that it listens on.
    pub(crate) port: u16,
    metrics: u16,
    /// The label that has to be `rdma`.
    rdma_end: &'static str,
    /// The device that the connections have to use.
    device: String,
}

impl Bridge {
    /// Starts a bridge that listens on TCP and connects over RDMA alone.
    pub(crate) fn to_rdma(plan: &Plan, port: u16) -> Result<Self, Failure> {
        Self::start(plan, "tcp://127.0.0.1:0", &format!("rdma://127.0.0.1:{port}"), "target")
    }

    /// Starts a bridge that listens for RDMA alone and connects over TCP.
    pub(crate) fn from_rdma(plan: &Plan, port: u16) -> Result<Self, Failure> {
        Self::start(plan, "rdma://127.0.0.1:0", &format!("tcp://127.0.0.1:{port}"), "client")
    }

    fn start(plan: &Plan, listen: &str, connect: &str, rdma_end: &'static str) -> Result<Self, Failure> {
        let metrics = process::free_port()?;
        let mut command = Command::new(&plan.paths.command);
        command
            .args(["bridge", "--policy", "require", "--log", "info"])
            .args(["--listen", listen, "--connect", connect])
            .args(["--metrics", &format!("127.0.0.1:{metrics}")])
            .envs(plan.rdma());
        let (running, line) = RunningProgram::start("the bridge", command)?;
        let port = line
            .strip_prefix("listening on ")
            .and_then(|rest| rest.split(',').next()?.rsplit(':').next()?.parse().ok())
            .ok_or_else(|| Failure::from(format!("the bridge began with {line:?}, which names no port")))?;
        Ok(Self { running, port, metrics, rdma_end, device: plan.device() })
    }

    /// Checks that the bridge had connections, all of them over RDMA and the required device. Ends the
    /// bridge.
    pub(crate) fn check_rdma(&mut self) -> Result<(), Failure> {
        let counters = scrape(self.metrics).map_err(|error| {
            Failure::run(format!("the bridge's metrics: {error}; {}", self.running.errors()))
        })?;
        let (rdma, other) = count_connections(&counters, self.rdma_end);
        if rdma == 0 || other != 0 {
            let errors = self.running.errors();
            return Err(
                format!("the bridge carried {rdma} connections over RDMA, {other} not: {errors}").into()
            );
        }
        // The bridge must not use other devices: `plan.rdma()` names this one.
        if !names_device(&self.running.log(), &self.device) {
            let errors = self.running.errors();
            return Err(format!("the bridge's log has no connection over {}: {errors}", self.device).into());
        }
        Ok(())
    }

    /// Ends the bridge, and returns the end of its log.
    pub(crate) fn log(&mut self) -> String {
        self.running.errors()
    }
}

fn scrape(port: u16) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
    let mut text = Vec::new();
    stream.take(4 << 20).read_to_end(&mut text)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// Returns the number of connections whose `end` was RDMA, and of others.
fn count_connections(counters: &str, end: &str) -> (u64, u64) {
    let label = format!("{end}=\"rdma\"");
    let mut counts = (0, 0);
    for line in counters.lines().filter(|line| line.starts_with(CONNECTIONS)) {
        let count = line.rsplit(' ').next().and_then(|it| it.parse().ok()).unwrap_or(0);
        if line.contains(&label) {
            counts.0 += count;
        } else {
            counts.1 += count;
        }
    }
    counts
}

/// Returns whether the bridge's log has a connection over RDMA that uses the device.
fn names_device(log: &str, device: &str) -> bool {
    log.lines()
        .filter(|line| line.contains(" over rdma: "))
        .any(|line| line.split(|it: char| !it.is_alphanumeric() && it != '_').any(|word| word == device))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_are_counted_by_transport() {
        let counters = "# TYPE tonic_rdma_bridge_connections_total counter\n\
            tonic_rdma_bridge_connections_total{route=\"a\",client=\"tcp\",target=\"rdma\"} 3\n\
            tonic_rdma_bridge_connections_total{route=\"a\",client=\"tcp\",target=\"tcp\"} 2\n\
            tonic_rdma_bridge_bytes_total{route=\"a\",target=\"rdma\"} 99\n";
        assert_eq!(count_connections(counters, "target"), (3, 2));
        assert_eq!(count_connections(counters, "client"), (0, 5));
        assert_eq!(count_connections("", "client"), (0, 0));
    }

    #[test]
    fn the_device_is_the_one_of_a_connection() {
        let log = "INFO opened rxe1\nINFO route=\"a\" suppressed=0 clients come over rdma: both ends have an RDMA \
            device, this one rxe0\n";
        assert!(names_device(log, "rxe0"));
        assert!(!names_device(log, "rxe"));
        assert!(!names_device(log, "rxe1"));
        assert!(!names_device("", "rxe0"));
    }
}
