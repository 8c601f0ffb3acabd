//! The ways to compute.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tonic_rdma_commands::Failure;

use crate::measure::process::cores::thread_cpu_time;

/// A way to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Compute {
    /// Workers only pull and push.
    None,
    /// A wait, which takes no core: the computing is done by an accelerator.
    Wait,
    /// Arithmetic on the worker's own core, which takes this much CPU time.
    Work,
}

impl Compute {
    pub(crate) const ALL: [Self; 3] = [Self::None, Self::Wait, Self::Work];

    /// Returns the name on the command line and in the JSON.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Wait => "wait",
            Self::Work => "work",
        }
    }

    /// Returns the way called `name`.
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|compute| compute.name() == name)
    }
}

/// What a worker does between its pull and its push.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Computing {
    pub(crate) compute: Compute,
    pub(crate) nanos: u64,
}

impl Computing {
    /// Computes on a thread of its own, so that the runtime's thread stays free for the connections.
    pub(crate) async fn run(self) -> Result<(), Failure> {
        let time = Duration::from_nanos(self.nanos);
        let computed = match self.compute {
            Compute::None => return Ok(()),
            // Tokio's timer counts whole milliseconds, which is too coarse for the shortest times.
            Compute::Wait => tokio::task::spawn_blocking(move || std::thread::sleep(time)).await,
            Compute::Work => tokio::task::spawn_blocking(move || work(time)).await,
        };
        computed.map_err(|error| Failure::run("the computing of a mini-batch crashed").because(error))
    }
}

/// Multiplies and adds numbers that fit into a core's cache, until this thread has used `time` of its core.
fn work(time: Duration) {
    const NUMBERS: usize = 4096;
    let begun = thread_cpu_time();
    let mut numbers = [1.0_f32; NUMBERS];
    while thread_cpu_time().saturating_sub(begun) < time {
        for number in &mut numbers {
            *number = number.mul_add(0.999, 0.001);
        }
        std::hint::black_box(&mut numbers);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use std::time::Instant;

    use super::*;

    #[test]
    fn names_are_distinct_and_read_back() {
        for compute in Compute::ALL {
            assert_eq!(Compute::from_name(compute.name()), Some(compute));
            assert_eq!(serde_json::to_value(compute).ok(), Some(compute.name().into()));
        }
        assert_eq!(Compute::from_name("sleep"), None);
    }

    #[tokio::test]
    async fn computing_takes_its_time() {
        let time = Duration::from_millis(20);
        for compute in [Compute::Wait, Compute::Work] {
            let begun = Instant::now();
            Computing { compute, nanos: time.as_nanos() as u64 }.run().await.unwrap();
            assert!(begun.elapsed() >= time, "{compute:?}");
        }
    }

    #[test]
    fn work_takes_cpu_time() {
        let (time, before) = (Duration::from_millis(20), thread_cpu_time());
        work(time);
        assert!(thread_cpu_time().saturating_sub(before) >= time);
    }
}
