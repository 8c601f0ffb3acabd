//! Where a rank reports to.

use std::fmt::Debug;
use std::io::{self, Write};

use tonic_rdma_commands::Failure;

use crate::launch;
use crate::output::Results;
use crate::report::Report;

/// Where a rank reports to.
pub(crate) trait Sink: Debug {
    fn report(&mut self, report: Report) -> Result<(), Failure>;
}

/// The process that started this rank. It reads a line of JSON for each report.
#[derive(Debug)]
pub(crate) struct Parent {
    /// Whether this is rank 0, which reports for all.
    pub(crate) first: bool,
}

impl Sink for Parent {
    fn report(&mut self, report: Report) -> Result<(), Failure> {
        let of_each_rank = matches!(report, Report::Done { .. } | Report::Failed { .. });
        if !self.first && !of_each_rank {
            return Ok(());
        }
        let line = serde_json::to_string(&report)
            .map_err(|error| Failure::run("can't write a report").because(error))?;
        let mut stdout = io::stdout().lock();
        writeln!(stdout, "{line}").and_then(|()| stdout.flush()).map_err(|error| Failure::output(&error))
    }
}

/// This process itself, which a launcher started. Only rank 0 shows results.
#[derive(Debug, Default)]
pub(crate) struct Own {
    pub(crate) first: bool,
    pub(crate) results: Results,
}

impl Sink for Own {
    fn report(&mut self, report: Report) -> Result<(), Failure> {
        if let Report::Done { wrong } = report {
            self.results.wrong += wrong;
        } else if self.first {
            launch::announce(&report);
            self.results.add(report);
        }
        Ok(())
    }
}
