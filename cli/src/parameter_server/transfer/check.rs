//! The check and the use of a tensor by its receiver.

use tonic_rdma_commands::Failure;
use tonic_rdma_tensor::Arrived;

use super::variables::Layout;
use crate::parameter_server::processes::control::{Done, TurnRequest};
use tonic_rdma_payload::content::{check_all, check_stamps, check_stamps_of};
use tonic_rdma_payload::reduce::{Reduced, Reduction, reduce};

/// The tensors that were received in a turn, and the results of consuming them.
#[derive(Clone, Debug)]
pub(crate) struct Receipt {
    every_byte: bool,
    reduces: bool,
    found: Reduced,
    checked: u64,
}

/// The position of a tensor: a variable or gradient of a mini-batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TensorPosition<'a> {
    /// The layout of the sender's tensors.
    pub(crate) layout: &'a Layout,
    pub(crate) index: usize,
    pub(crate) step: u64,
}

impl Receipt {
    /// Makes an empty receipt. Tensors are checked at every byte or at stamps, and consumed if `reduces`.
    pub(crate) fn new(every_byte: bool, reduces: bool) -> Self {
        Self { every_byte, reduces, found: Reduced::NOTHING, checked: 0 }
    }

    /// Makes an empty receipt for `turn`.
    pub(crate) fn of(turn: &TurnRequest, reduces: bool) -> Self {
        Self::new(turn.every_byte, reduces)
    }

    /// Checks and consumes a tensor that lies in `bytes`.
    pub(crate) fn take(&mut self, place: TensorPosition<'_>, bytes: &[u8]) -> Result<(), Failure> {
        let seed = self.expect(place, bytes.len())?;
        let wrong = match self.every_byte {
            true => check_all(seed, bytes),
            false => check_stamps(seed, bytes, place.step),
        };
        if self.reduces {
            self.found = self.found.and(reduce(bytes));
        }
        self.accept(place, wrong)
    }

    /// Checks and consumes a tensor that lies in a slot. Reads the slot piece by piece, so that the pieces stay in the
    /// cache.
    pub(crate) fn take_from_slot(
        &mut self,
        place: TensorPosition<'_>,
        arrived: &Arrived<'_>,
    ) -> Result<(), Failure> {
        let seed = self.expect(place, arrived.len())?;
        let (memory, range) = arrived.memory();
        let mut wrong = check_stamps_of(seed, arrived.len(), place.step, |start, word| {
            // The word lies within the tensor, and so within the slot. A failed read leaves zeros, which are wrong.
            let _ = memory.copy_out(range.start + start, word);
        });
        if self.reduces || self.every_byte {
            let (mut at, mut reduction) = (0, Reduction::new());
            arrived.for_each_piece(|piece| {
                if self.every_byte {
                    // All pieces but the last are whole cache lines.
                    let differs = check_all(seed.wrapping_add(at / 8), piece).map(|offset| at + offset);
                    wrong = wrong.or(differs);
                }
                if self.reduces {
                    reduction.take(piece);
                }
                at += piece.len() as u64;
            });
            self.found = self.found.and(reduction.end());
        }
        self.accept(place, wrong)
    }

    /// Adds the receipt of another part of the turn.
    pub(crate) fn add(&mut self, other: &Self) {
        self.found = self.found.and(other.found);
        self.checked += other.checked;
    }

    /// Returns the result to report at the end of the turn.
    pub(crate) fn done(&self) -> Done {
        let found = self.reduces.then_some(self.found);
        let (maximum, digest) = (found.map(|it| it.maximum.to_bits()), found.map(|it| it.digest));
        Done { maximum, digest, checked: self.checked, ..Done::default() }
    }

    fn expect(&self, place: TensorPosition<'_>, length: usize) -> Result<u64, Failure> {
        match place.layout.expected(place.index, place.step) {
            Some((expected, seed)) if expected == length => Ok(seed),
            Some((expected, _)) => {
                Err(Failure::run(format!("{place} has {length} bytes and not {expected}")))
            }
            None => Err(Failure::run(format!("{place} does not exist"))),
        }
    }

    fn accept(&mut self, place: TensorPosition<'_>, wrong: Option<u64>) -> Result<(), Failure> {
        self.checked += 1;
        match wrong {
            None => Ok(()),
            Some(offset) => Err(Failure::run(format!("byte {offset} of {place} arrived wrong"))),
        }
    }
}

impl std::fmt::Display for TensorPosition<'_> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "variable {} of mini-batch {}", self.index, self.step)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::super::shard::Shard;
    use super::super::variables::{Origin, Variables};
    use super::*;
    use crate::workload::Model;

    #[test]
    fn misplaced_and_wrong_tensors_are_named() {
        let variables = Variables::new(Model::Gru, Origin::Server, Shard::WHOLE).unwrap();
        let layout = variables.layout();
        let place = |index, step| TensorPosition { layout, index, step };
        let bytes = variables.bytes(2, 5).unwrap();
        for every_byte in [false, true] {
            let mut receipt = Receipt::new(every_byte, true);
            receipt.take(place(2, 5), &bytes).unwrap();
            receipt.take(place(2, 9), &bytes).unwrap();
            let error = receipt.take(place(2, 6), &bytes).unwrap_err().to_string();
            assert!(error.contains("byte 0 of variable 2 of mini-batch 6"), "{error}");
            let error = receipt.take(place(2, 5), &bytes[1..]).unwrap_err().to_string();
            assert!(error.contains("4095 bytes and not 4096"), "{error}");
            receipt.take(place(layout.len(), 5), &bytes).unwrap_err();
            let done = receipt.done();
            assert_eq!((done.maximum, done.checked), (Some(reduce(&bytes).maximum.to_bits()), 3));
        }
        // A few bytes of another mini-batch, at a place that stamps do not read. The largest element stays equal.
        let found = |bytes: &[u8]| {
            let mut receipt = Receipt::new(false, true);
            receipt.take(place(2, 5), bytes).unwrap();
            receipt.done()
        };
        let mut torn = bytes.to_vec();
        torn[2000..2008].copy_from_slice(&variables.bytes(2, 6).unwrap()[2000..2008]);
        let (right, torn) = (found(&bytes), found(&torn));
        assert_eq!(right.maximum, torn.maximum);
        assert_ne!(right.digest, torn.digest);
        let mut wrong = bytes.to_vec();
        wrong[2001] ^= 1;
        let error = Receipt::new(true, false).take(place(2, 5), &wrong).unwrap_err().to_string();
        assert!(error.contains("byte 2001 of variable 2"), "{error}");
        assert_eq!(Receipt::new(true, false).done().maximum, None);
    }
}
