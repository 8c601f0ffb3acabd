//! The program of a part: it feeds inputs, and compares what arrives and what comes out with the unsplit model.

use std::collections::HashMap;

use bytes::Bytes;
use tonic_rdma_graph::dataflow::{KernelError, NodeId, Outlet, Value as _};
use tonic_rdma_graph::onnx::ModelValue;
use tonic_rdma_graph::placement::CrossingId;
use tonic_rdma_graph::schedule::{Direction, Program};

use crate::control::{Checked, Differs, Done, Expected, Turn};
use crate::set::digest;

/// Inputs, and what is compared.
#[derive(Debug)]
pub(super) struct Checks {
    /// The inputs of this part, for each set.
    inputs: Vec<HashMap<NodeId, ModelValue>>,
    /// The results of the model, in order.
    results: Vec<Outlet>,
    digests: HashMap<Checked, Vec<u64>>,
}

/// A turn of a part.
#[derive(Debug)]
pub(super) struct Checking<'a> {
    checks: &'a Checks,
    turn: &'a Turn,
    pub(super) done: Done,
    /// The first tensor of the turn that differs.
    pub(super) difference: Option<(Differs, Bytes)>,
}

impl Checks {
    /// Makes the program of a part with these inputs, for each set.
    pub(super) fn new(inputs: Vec<HashMap<NodeId, ModelValue>>, results: Vec<Outlet>) -> Self {
        Self { inputs, results, digests: HashMap::new() }
    }

    /// Sets what is compared.
    pub(super) fn expect(&mut self, expected: Expected) {
        let crossings =
            expected.crossings.into_iter().map(|(number, digests)| (Checked::Crossing(number), digests));
        let results = expected.results.into_iter().map(|(place, digests)| (Checked::Result(place), digests));
        self.digests = crossings.chain(results).collect();
    }

    /// Returns the set of inputs of a micro-batch.
    fn set_of(&self, micro_batch: u64) -> u64 {
        micro_batch % (self.inputs.len() as u64).max(1)
    }

    /// Begins a turn.
    pub(super) fn begin<'a>(&'a self, turn: &'a Turn) -> Checking<'a> {
        Checking { checks: self, turn, done: Done::default(), difference: None }
    }
}

impl Checking<'_> {
    fn compare(&mut self, what: Checked, micro_batch: u64, value: &ModelValue) -> Result<(), KernelError> {
        if !self.turn.check {
            return Ok(());
        }
        let set = self.checks.set_of(micro_batch);
        let expected = self.checks.digests.get(&what).and_then(|digests| digests.get(set as usize));
        let expected = *expected.ok_or_else(|| format!("{what:?}: nothing is known of the unsplit model"))?;
        self.done.checked += 1;
        if digest(value)? != expected {
            self.done.errors += 1;
            if self.difference.is_none() {
                let (mode, spec) = (self.turn.mode, value.spec()?.to_string());
                let differs = Differs { what, mode, micro_batch, set, spec };
                self.difference = Some((differs, Bytes::copy_from_slice(value.bytes())));
            }
        }
        Ok(())
    }
}

impl Program<ModelValue> for Checking<'_> {
    fn feed(&mut self, step: u64, input: NodeId) -> Result<ModelValue, KernelError> {
        let set = self.checks.set_of(step) as usize;
        let value = self.checks.inputs.get(set).and_then(|inputs| inputs.get(&input));
        let value = value.ok_or("no such input in this part")?;
        // A tensor of its own for each micro-batch, as if it were read from a file: its memory may be registered.
        ModelValue::filled(&value.spec()?, &mut |bytes| {
            bytes.copy_from_slice(value.bytes());
            Ok(())
        })
    }

    fn result(&mut self, step: u64, outlet: Outlet, value: ModelValue) -> Result<(), KernelError> {
        // A model may name an output twice.
        let places: Vec<usize> =
            (0..self.checks.results.len()).filter(|place| self.checks.results[*place] == outlet).collect();
        places.into_iter().try_for_each(|place| self.compare(Checked::Result(place), step, &value))
    }

    fn crossed(
        &mut self,
        direction: Direction,
        crossing: CrossingId,
        step: u64,
        value: &ModelValue,
    ) -> Result<(), KernelError> {
        match direction {
            Direction::Sent => Ok(()),
            Direction::Received => self.compare(Checked::Crossing(crossing.0), step, value),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use tonic_rdma_graph::transfer::Mode;
    use tonic_rdma_tensor::{Dtype, Shape, TensorSpec};

    use super::*;

    fn value(first: u8) -> ModelValue {
        let spec = TensorSpec::new(Dtype::U8, Shape::new(&[2]).unwrap()).unwrap();
        let mut fill = |bytes: &mut [u8]| {
            bytes.copy_from_slice(&[first, 7]);
            Ok(())
        };
        ModelValue::filled(&spec, &mut fill).unwrap()
    }

    #[test]
    fn each_micro_batch_is_compared_with_its_own_set_of_inputs() {
        let inputs = vec![HashMap::from([(NodeId(0), value(0))]), HashMap::from([(NodeId(0), value(1))])];
        let mut checks = Checks::new(inputs, Vec::new());
        let digests = vec![digest(&value(0)).unwrap(), digest(&value(1)).unwrap()];
        checks.expect(Expected { crossings: vec![(4, digests)], results: Vec::new() });
        let turn = Turn { mode: Mode::RdmaCp, first: 0, count: 4, replay: false, check: true };
        let mut checking = checks.begin(&turn);
        assert_eq!(checking.feed(3, NodeId(0)).unwrap().bytes(), [1, 7]);
        for (micro_batch, content) in [(0, 0), (1, 1), (2, 0), (3, 0)] {
            checking.crossed(Direction::Received, CrossingId(4), micro_batch, &value(content)).unwrap();
        }
        assert_eq!((checking.done.checked, checking.done.errors), (4, 1));
        let (differs, content) = checking.difference.unwrap();
        assert_eq!((differs.micro_batch, differs.set, &content[..]), (3, 1, &[0, 7][..]));
        let mut checking = checks.begin(&turn);
        assert!(checking.crossed(Direction::Received, CrossingId(5), 4, &value(1)).is_err());

        // A turn that is measured compares nothing.
        let measured = Turn { check: false, ..turn.clone() };
        let mut checking = checks.begin(&measured);
        checking.crossed(Direction::Received, CrossingId(4), 0, &value(9)).unwrap();
        assert_eq!((checking.done.checked, checking.done.errors), (0, 0));
    }
}
