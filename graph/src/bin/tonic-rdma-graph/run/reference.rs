//! The unsplit model: what each crossing tensor and each result has to be.

#[cfg(test)]
mod tests;

use std::collections::HashMap;

use tonic_rdma_commands::Failure;
use tonic_rdma_graph::dataflow::Outlet;
use tonic_rdma_graph::onnx::ModelValue;

use super::plan::Plan;
use crate::control::{Checked, Differs, Expected};
use crate::set::{digest, lengths as lengths_of};

/// The values of the unsplit model, for each set of inputs.
#[derive(Debug)]
pub(crate) struct Reference {
    sets: Vec<HashMap<Outlet, ModelValue>>,
}

impl Reference {
    /// Runs the unsplit model with each set of inputs.
    pub(crate) fn compute(plan: &Plan, seed: u64, lengths: &[u64]) -> Result<Self, Failure> {
        let failed = |error| Failure::run("the unsplit model").because(error);
        let graph = plan.model.topology();
        let crossings = plan.placements.crossings().iter().map(|crossing| crossing.outlet);
        let wanted: Vec<Outlet> = crossings.chain(graph.results().iter().copied()).collect();
        let symbols = plan.model.symbols();
        let sets = (0..plan.sets).map(|set| {
            let inputs = plan.model.inputs(set, seed, &lengths_of(&symbols, lengths, set)).map_err(failed)?;
            plan.model.run_unsplit(&inputs, wanted.iter().copied()).map_err(failed)
        });
        Ok(Self { sets: sets.collect::<Result<_, _>>()? })
    }

    /// Returns what a part has to check.
    pub(crate) fn expected(&self, plan: &Plan, part: usize) -> Result<Expected, Failure> {
        let digests = |outlet: Outlet| {
            let values = self.sets.iter().filter_map(|set| set.get(&outlet));
            values.map(digest).collect::<Result<Vec<u64>, _>>()
        };
        let partition = plan.placements.partition();
        let mut expected = Expected::default();
        for crossing in plan.placements.crossings().iter().filter(|crossing| crossing.to.0 == part) {
            expected.crossings.push((crossing.id.0, digests(crossing.outlet)?));
        }
        for (place, outlet) in plan.model.topology().results().iter().enumerate() {
            if partition.part_of(outlet.node).is_some_and(|owner| owner.0 == part) {
                expected.results.push((place, digests(*outlet)?));
            }
        }
        Ok(expected)
    }

    /// Returns the bytes of an output of the largest set of inputs.
    pub(crate) fn bytes(&self, outlet: Outlet) -> u64 {
        let values = self.sets.iter().filter_map(|set| set.get(&outlet));
        values.map(|value| value.bytes().len() as u64).max().unwrap_or(0)
    }

    /// Describes a tensor that differs: its name, and its first element that differs.
    pub(crate) fn describe(&self, plan: &Plan, differs: &Differs, content: &[u8]) -> String {
        let graph = plan.model.topology();
        let (name, outlet) = match differs.what {
            Checked::Crossing(number) => match plan.placements.crossings().get(number) {
                Some(crossing) => (format!("crossing tensor {}", crossing.name), crossing.outlet),
                None => return format!("crossing tensor {number} is not in the model"),
            },
            Checked::Result(place) => match graph.results().get(place) {
                Some(outlet) => (format!("result {}", graph.outlet_name(*outlet)), *outlet),
                None => return format!("result {place} is not in the model"),
            },
        };
        let begin = format!(
            "{}, micro-batch {}: {name} differs from the unsplit model",
            differs.mode, differs.micro_batch
        );
        let Some(right) = self.sets.get(differs.set as usize).and_then(|set| set.get(&outlet)) else {
            return begin;
        };
        match right.spec() {
            Ok(spec) if spec.to_string() == differs.spec => {
                let size = spec.dtype().size().unwrap_or(1).max(1);
                let mut pairs = right.bytes().chunks(size).zip(content.chunks(size)).enumerate();
                match pairs.find(|(_, (right, found))| right != found) {
                    Some((element, (right, found))) => format!(
                        "{begin}, first at element {element} of {spec}: it is {}, and should be {}",
                        number(&differs.spec, found),
                        number(&differs.spec, right)
                    ),
                    None => begin,
                }
            }
            Ok(spec) => format!("{begin}: it is {}, and should be {spec}", differs.spec),
            Err(_) => begin,
        }
    }
}

/// Writes an element of a tensor of this type, with its bytes.
fn number(spec: &str, bytes: &[u8]) -> String {
    let hex: String = bytes.iter().rev().map(|byte| format!("{byte:02x}")).collect();
    match <[u8; 4]>::try_from(bytes) {
        Ok(four) if spec.starts_with("float32") => format!("{} (0x{hex})", f32::from_ne_bytes(four)),
        _ => format!("0x{hex}"),
    }
}
