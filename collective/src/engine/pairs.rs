//! The numbers of operations. Messages of a group have one sequence of numbers; messages from one rank to another have one for
//! each direction, because only these two ranks make the calls.

use super::call::Kind;

#[derive(Debug)]
pub(super) struct Numbers {
    pub(super) group: u64,
    sends: Vec<u64>,
    receives: Vec<u64>,
}

impl Numbers {
    pub(super) fn new(ranks: usize) -> Self {
        Self { group: 0, sends: vec![0; ranks], receives: vec![0; ranks] }
    }

    /// Returns the number of the next operation of this kind.
    pub(super) fn next(&mut self, kind: Kind) -> u64 {
        let number = match kind {
            Kind::Group(_) => &mut self.group,
            Kind::Send { to } => &mut self.sends[to],
            Kind::Receive { from } => &mut self.receives[from],
        };
        *number += 1;
        *number - 1
    }
}
