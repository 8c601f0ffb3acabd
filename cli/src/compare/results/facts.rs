//! The facts about a run, without which its figures mean nothing.

use serde::Serialize;
use tonic_rdma_commands::cores::Cores;
use tonic_rdma_commands::units;

use crate::compare::modes::mode::Mode;
use crate::compare::options::{CompareOptions, Conditions, RunContext};
use crate::compare::plan::Plan;
use crate::compare::plan::cell::{Cell, Direction};
use crate::compare::results::row::Checks;
use crate::measure::consume::Consume;
use crate::measure::settings::Http2Sizes;
use crate::measure::machine::Environment;
use crate::measure::transport::{Encode, RdmaConnection};

/// The facts about a run.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Facts {
    #[serde(flatten)]
    environment: Environment,
    /// Device and reason of the RDMA connection.
    #[serde(skip_serializing_if = "Option::is_none")]
    verdict: Option<String>,
    http2: Http2Facts,
    direction: Direction,
    encode: Encode,
    /// Use of payloads by receivers, and the modes in which receivers look for the largest element.
    consume: Consume,
    reducing_modes: Vec<&'static str>,
    #[serde(flatten)]
    conditions: Conditions,
    /// Whether the server ran in a container of its own.
    container: bool,
    /// Cores that the processes were kept on; absent if they were not pinned.
    cores: Option<Cores>,
    seconds_per_cell_and_mode: f64,
    checks: Checks,
    /// Descriptions of the workloads' operations.
    #[serde(skip)]
    workloads: Vec<String>,
    #[serde(skip)]
    open_loop: bool,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Http2Facts {
    setting: String,
    #[serde(skip)]
    description: String,
    sizes: Option<Http2Sizes>,
}

impl Facts {
    /// Describes the use of payloads by receivers.
    fn receiver(&self) -> String {
        match self.reducing_modes.as_slice() {
            [] => "leaves payloads as they are after the check, in all modes".to_owned(),
            modes => {
                let when = match self.direction {
                    Direction::Up => "before it answers",
                    Direction::Down => "before the call counts as done",
                };
                format!("consumes payloads by reduce_max (f32) {when}: {}", modes.join(", "))
            }
        }
    }

    /// Collects the facts once the run is over.
    pub(crate) fn new(
        plan: &Plan,
        options: &CompareOptions,
        context: &RunContext,
        verdict: Option<RdmaConnection>,
        checks: Checks,
    ) -> Self {
        let (provider, verdict) = verdict.map(|verdict| (verdict.provider, verdict.reason)).unzip();
        let RunContext { conditions, cores, costs } = *context;
        let http2 = options.http2;
        Self {
            environment: Environment::new(provider, costs),
            verdict,
            http2: Http2Facts { setting: http2.name(), description: http2.to_string(), sizes: http2.sizes() },
            direction: plan.direction,
            encode: options.encode,
            consume: options.consume,
            reducing_modes: reducing(&plan.modes, options.consume),
            conditions,
            container: options.container,
            cores,
            seconds_per_cell_and_mode: plan.duration.as_secs_f64(),
            checks,
            workloads: workloads(&plan.cells),
            open_loop: plan.is_open_loop(),
        }
    }

    /// Returns the facts as pairs of name and value, for people.
    pub(crate) fn lines(&self) -> Vec<(&'static str, String)> {
        let cores = match self.cores {
            Some(cores) => format!("client on core {}, server on core {}", cores.client, cores.server),
            None => format!("not pinned ({})", self.conditions.why_not_pinned()),
        };
        let apart = if self.container { "; the server is in a container of its own" } else { "" };
        let mut lines = Vec::new();
        if self.conditions.newcomer {
            lines.push(("newcomer", "yes: the allocator, runtime and processes below".to_owned()));
        }
        lines.extend(self.verdict.clone().map(|verdict| ("connection", verdict)));
        lines.extend([
            ("HTTP/2", self.http2.description.clone()),
            ("direction", self.direction.describe().to_owned()),
            ("encoding", self.encode.to_string()),
            ("receiver", self.receiver()),
            ("runtime", format!("tokio, {}, in both processes", self.conditions.runtime)),
            ("processes", cores + apart),
            (
                "time",
                format!("{} s for each mode in each cell", units::digits(self.seconds_per_cell_and_mode)),
            ),
            ("content", self.checks.summary()),
        ]);
        lines.extend(self.workloads.iter().map(|workload| ("workload", workload.clone())));
        if self.open_loop {
            let what = "Poisson arrivals, the same for all modes; latency counts from the time when a call was due; CPU/op without \
                        the client's waiting for the next call";
            lines.push(("open loop", what.to_owned()));
        }
        self.environment.with("both", lines)
    }
}

/// Returns the names of the modes whose receivers look for the largest element.
fn reducing(modes: &[Mode], consume: Consume) -> Vec<&'static str> {
    modes.iter().filter(|mode| mode.reduces(consume)).map(|mode| mode.name()).collect()
}

/// Returns a line for each workload among `cells`.
fn workloads(cells: &[Cell]) -> Vec<String> {
    let mut lines = Vec::new();
    for cell in cells {
        let line = format!("{} ({} each)", cell.load.describe(), units::rough_size(cell.load.bytes()));
        if cell.load.name().is_some() && !lines.contains(&line) {
            lines.push(line);
        }
    }
    lines
}
