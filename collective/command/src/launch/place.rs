//! The place of a rank that this command started as a process of its own.

use rustix::process::{Pid, Signal};
use serde::{Deserialize, Serialize};
use tonic_rdma_commands::Failure;

use crate::cores;
use crate::kills::Batch;

/// What a process must know to be a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Place {
    pub(crate) rank: usize,
    pub(crate) size: usize,
    /// The address of rank 0 for each communicator.
    pub(crate) addresses: Vec<String>,
    /// The core that the rank stays on.
    pub(crate) core: Option<usize>,
    /// The trials of a rank that works for `--kills` or `--stops`.
    pub(crate) batch: Option<Batch>,
    /// The process that started the ranks.
    pub(crate) parent: i32,
}

impl Place {
    /// Returns the text for the command line of the rank.
    pub(crate) fn to_text(&self) -> Result<String, Failure> {
        serde_json::to_string(self).map_err(|error| Failure::run("can't describe a rank").because(error))
    }

    /// Reads the text of the command line.
    pub(crate) fn parse(text: &str) -> Result<Self, Failure> {
        serde_json::from_str(text).map_err(|error| Failure::usage(format!("--child {text:?}: {error}")))
    }

    /// Makes this process the rank: it ends with its parent, and stays on its core.
    pub(crate) fn take(&self) -> Result<(), Failure> {
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
            .map_err(|error| Failure::run("can't ask for the signal of the parent's end").because(error))?;
        // The parent may have ended before the call.
        if rustix::process::getppid().map(Pid::as_raw_pid) != Some(self.parent) {
            return Err(Failure::run("the process that started this rank has ended"));
        }
        match self.core {
            Some(core) => cores::pin(core).map_err(|error| {
                Failure::run(format!("can't keep rank {} on core {core}", self.rank)).because(error)
            }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_read_back() {
        let addresses = vec!["127.0.0.1:4000".to_owned()];
        let place = Place { rank: 1, size: 4, addresses, core: Some(1), batch: None, parent: 77 };
        assert_eq!(Place::parse(&place.to_text().unwrap()).unwrap(), place);
        let error = Place::parse("{}").unwrap_err();
        assert!(error.is_usage() && error.to_string().contains("--child"), "{error}");
    }
}
