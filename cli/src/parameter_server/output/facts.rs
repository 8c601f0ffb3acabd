//! The facts about a run, without which its figures mean nothing.

use serde::Serialize;
use tonic_rdma_commands::units;

use crate::measure::consume::Consume;
use crate::measure::machine::costs::Costs;
use crate::measure::machine::description::Machine;
use crate::measure::process::allocator::Allocator;
use crate::parameter_server::meter::{ROUNDS, TrainingMeter};
use crate::parameter_server::options::ParameterServerOptions;
use crate::parameter_server::servers::Servers;

/// The facts about a run.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct TrainingFacts {
    /// The RDMA provider in use; `none` if no mode needs one.
    provider: String,
    version: &'static str,
    allocator: &'static str,
    http2: String,
    /// Calls that a worker has in flight in gRPC modes.
    inflight: usize,
    consume: Consume,
    pinned: bool,
    machine: Machine,
    /// The costs of basic operations on this machine.
    round_trips: Costs,
    /// Mini-batches of each worker in each turn, if the command line gives the number.
    #[serde(skip_serializing_if = "Option::is_none")]
    steps: Option<u32>,
    seconds_per_cell_and_mode: f64,
    /// The factor of the computing times, if workers compute.
    #[serde(skip_serializing_if = "Option::is_none")]
    compute_scale: Option<String>,
    turns: u32,
    /// Whether the build is optimised. An unoptimised build measures itself more than the transport.
    optimised: bool,
    checks: TensorChecks,
    #[serde(skip)]
    several_servers: bool,
    #[serde(skip)]
    http2_description: String,
}

/// Number of tensors that were checked. A wrong tensor ends the run.
#[derive(Clone, Copy, Debug, Serialize)]
struct TensorChecks {
    every_byte: u64,
    stamps: u64,
}

impl TrainingFacts {
    /// Collects the facts once the run is over.
    pub(crate) fn new(options: &ParameterServerOptions, meter: &TrainingMeter<'_>) -> Self {
        Self {
            provider: meter.provider.clone().unwrap_or_else(|| "none".to_owned()),
            version: env!("CARGO_PKG_VERSION"),
            allocator: Allocator::of_this_process().name(),
            http2: options.http2.name(),
            inflight: options.inflight,
            consume: options.consume,
            pinned: meter.pinned,
            machine: Machine::this(),
            round_trips: Costs::measure(),
            steps: options.steps,
            seconds_per_cell_and_mode: options.duration.as_secs_f64(),
            compute_scale: options.computes().then(|| options.compute_scale.to_string()),
            several_servers: options.servers != Servers::Number(1),
            turns: ROUNDS,
            optimised: !cfg!(debug_assertions),
            checks: TensorChecks { every_byte: meter.every_byte, stamps: meter.stamps },
            http2_description: options.http2.to_string(),
        }
    }

    /// Returns the facts as pairs of name and value, for people.
    pub(crate) fn lines(&self) -> Vec<(&'static str, String)> {
        let Machine { cpu, cores, kernel } = &self.machine;
        let time = match self.steps {
            Some(steps) => format!("{steps} mini-batches of each worker"),
            None => format!("{} s for each mode in all", units::digits(self.seconds_per_cell_and_mode)),
        };
        let TensorChecks { every_byte, stamps } = self.checks;
        let mut lines = vec![
            ("provider", self.provider.clone()),
            ("allocator", format!("{} in all processes, for all modes", self.allocator)),
            ("gRPC", format!("a call a variable, {} in flight for each worker", self.inflight)),
            ("HTTP/2", self.http2_description.clone()),
            (
                "receivers",
                match self.consume {
                    Consume::None => "leave tensors as they are after the check".to_owned(),
                    _ => "consume each tensor by reduce_max (f32), in all modes".to_owned(),
                },
            ),
            (
                "processes",
                match self.pinned {
                    true if self.several_servers => {
                        "servers share half of the cores, workers share the other half".to_owned()
                    }
                    true => "the server has a core to itself, workers share the others".to_owned(),
                    false => "not pinned (there are no two cores to pin to)".to_owned(),
                },
            ),
            ("machine", format!("{cpu}, {cores} cores, Linux {kernel}")),
            ("this machine", self.round_trips.summary()),
            ("time", format!("{} turns, {time}", self.turns)),
            (
                "content",
                format!("all as sent (every byte of {every_byte} tensors, sampled words of {stamps})"),
            ),
        ];
        if let Some(scale) = &self.compute_scale {
            let text =
                format!("the times of table 2 of the paper × {scale}; a worker does not transfer meanwhile");
            lines.push(("computing", text));
        }
        if !self.optimised {
            let build = "UNOPTIMISED: build with --release for figures that mean something";
            lines.push(("build", build.to_owned()));
        }
        lines
    }
}
