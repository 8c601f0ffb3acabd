//! The tokio runtime of both processes.

use std::fmt;
use std::io;

use tokio::runtime::{Builder, Runtime};
use tonic_rdma::runtime::idle_polling;

/// Most worker threads that are accepted.
const MAX_WORKERS: usize = 256;

/// A flavour of tokio's runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flavour {
    /// All on the process's main thread.
    CurrentThread,
    /// On this many worker threads.
    MultiThread(usize),
}

impl Flavour {
    /// `current-thread`, `multi-thread` with as many workers as there are cores, or `multi-thread:WORKERS`.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "current-thread" => Ok(Self::CurrentThread),
            None if text == "multi-thread" => Ok(Self::MultiThread(
                std::thread::available_parallelism().map_or(1, usize::from).min(MAX_WORKERS),
            )),
            Some(("multi-thread", workers)) => match workers.parse() {
                Ok(workers @ 1..=MAX_WORKERS) => Ok(Self::MultiThread(workers)),
                _ => Err(format!("bad number of workers {workers:?}; accepted: 1 to {MAX_WORKERS}")),
            },
            _ => Err("accepted: current-thread, multi-thread, multi-thread:WORKERS".to_owned()),
        }
    }

    /// A runtime that polls completions when it is idle.
    pub(crate) fn build(self) -> io::Result<Runtime> {
        idle_polling(&mut self.builder()).enable_all().build()
    }

    /// A runtime whose completions are polled by a task of their own. A load generator that yields until the next request is
    /// due never lets its runtime become idle.
    pub(crate) fn build_never_idle(self) -> io::Result<Runtime> {
        self.builder().enable_all().build()
    }

    fn builder(self) -> Builder {
        match self {
            Self::CurrentThread => Builder::new_current_thread(),
            Self::MultiThread(workers) => {
                let mut builder = Builder::new_multi_thread();
                builder.worker_threads(workers);
                builder
            }
        }
    }
}

impl fmt::Display for Flavour {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::CurrentThread => formatter.write_str("current-thread"),
            Self::MultiThread(workers) => write!(formatter, "multi-thread:{workers}"),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use super::*;

    #[test]
    fn a_flavour_survives_its_way_to_the_other_process() {
        for text in ["current-thread", "multi-thread", "multi-thread:3"] {
            let flavour = Flavour::parse(text).unwrap();
            assert_eq!(Flavour::parse(&flavour.to_string()), Ok(flavour));
        }
        assert_eq!(Flavour::parse("multi-thread:3"), Ok(Flavour::MultiThread(3)));
    }

    #[test]
    fn what_is_no_flavour_is_told_what_is() {
        for bad in ["", "threads", "current-thread:1", "multi", "multi-threads:2"] {
            assert!(Flavour::parse(bad).unwrap_err().contains("current-thread, multi-thread"), "{bad:?}");
        }
        for bad in
            ["multi-thread:", "multi-thread:0", "multi-thread:257", "multi-thread:x", "multi-thread:-1"]
        {
            assert!(Flavour::parse(bad).unwrap_err().contains("1 to 256"), "{bad:?}");
        }
    }
}
