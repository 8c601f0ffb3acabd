//! Programs of the latest calls.

use std::sync::Arc;

use super::program::{self, MemoryShape, Program};
use super::{CallerMemory, Engine, Kind, Request};
use crate::error::{CollectiveError, argument};
use crate::link::RankLinks;
use crate::plan::{Action, Area, Arguments, Collective, Plan, Span, Step, part};
use crate::reduce::Kernel;

/// How many programs an engine keeps.
const KEPT: usize = 32;

#[derive(Debug, Default)]
pub(super) struct Programs {
    /// The latest one first.
    latest: Vec<(Key, Arc<Program>)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Key {
    kind: Kind,
    /// `None` for messages between two ranks.
    arguments: Option<Arguments>,
    shape: MemoryShape,
}

impl<L: RankLinks> Engine<L> {
    /// Returns the program and the kernel of an operation.
    pub(super) fn prepare(
        &mut self,
        request: &Request,
        memory: &CallerMemory<L::Memory>,
    ) -> Result<(Arc<Program>, Option<Kernel>), CollectiveError> {
        let call = &request.call;
        let kernel = call.reduction.map(|reduction| Kernel::of(call.dtype, reduction)).transpose()?;
        let Some(size) = call.dtype.size() else {
            return Err(argument(format!("elements of type {:?} have no size", call.dtype)));
        };
        self.check(request, memory, size)?;
        let inline = self.links.inline();
        let (arguments, result) = match call.kind {
            Kind::Group(collective) => {
                let arguments = Arguments {
                    collective,
                    algorithm: call.algorithm,
                    ranks: self.ranks,
                    elements: call.elements,
                    chunk: call.chunk,
                    inline: inline / size,
                    hosts: self.hosts.clone(),
                };
                let result = match collective {
                    Collective::ReduceScatter => part(call.elements, self.ranks, self.rank),
                    Collective::Barrier => 0..0,
                    _ => 0..call.elements,
                };
                (Some(arguments), result)
            }
            Kind::Send { .. } => (None, 0..0),
            Kind::Receive { .. } => (None, 0..call.elements),
        };
        let shape = MemoryShape {
            size,
            elements: call.elements,
            input: request.input.map(|(start, end)| start..end),
            out: request.out.0..request.out.1,
            result,
            registered: match memory {
                // Peers can't read memory of another communicator over these links, so such memory
                // counts as not registered, and its elements are copied.
                CallerMemory::Owned { input, out } => {
                    input.iter().chain(out).all(|memory| self.links.offers(memory))
                }
                CallerMemory::Foreign(_) | CallerMemory::Borrowed => false,
            },
            inline,
        };
        let key = Key { kind: call.kind, arguments, shape };
        let latest = &mut self.programs.latest;
        if let Some(at) = latest.iter().position(|(other, _)| *other == key) {
            latest[..=at].rotate_right(1);
            return Ok((Arc::clone(&latest[0].1), kernel));
        }
        let plan = match &key.arguments {
            Some(arguments) => Plan::new(arguments, self.rank),
            None => point_to_point_plan(call.kind, call.elements),
        };
        let program = Arc::new(program::compile(&plan, &key.shape));
        latest.truncate(KEPT - 1);
        latest.insert(0, (key, program));
        Ok((Arc::clone(&latest[0].1), kernel))
    }

    /// Checks the request's rank, and that the memory has its elements.
    fn check(
        &self,
        request: &Request,
        memory: &CallerMemory<L::Memory>,
        size: usize,
    ) -> Result<(), CollectiveError> {
        let call = &request.call;
        let inside = |(start, end): (usize, usize)| start <= end && end <= call.elements;
        if !inside(request.out) || !request.input.is_none_or(inside) {
            return Err(argument(format!("the memory of {call} does not fit")));
        }
        let rank = match call.kind {
            Kind::Group(Collective::Broadcast { root: rank })
            | Kind::Send { to: rank }
            | Kind::Receive { from: rank } => rank,
            Kind::Group(_) => 0,
        };
        if rank >= self.ranks {
            return Err(argument(format!("there is no rank {rank} among {} ranks", self.ranks)));
        }
        if matches!(call.kind, Kind::Send { .. } | Kind::Receive { .. }) && rank == self.rank {
            return Err(argument(format!("rank {rank} can't exchange messages with itself")));
        }
        let CallerMemory::Owned { input, out } = memory else { return Ok(()) };
        let long = |memory: &Option<L::Memory>, (start, end): (usize, usize)| {
            memory.as_deref().map_or(0, <[u8]>::len) / size >= end - start
        };
        if !long(out, request.out) || !request.input.is_none_or(|range| long(input, range)) {
            return Err(argument(format!("the memory of {call} is too short")));
        }
        Ok(())
    }
}

/// Returns the plan of a message from one rank to another.
fn point_to_point_plan(kind: Kind, elements: usize) -> Plan {
    let span = Span { area: Area::Work, range: 0..elements };
    let action = match kind {
        Kind::Send { to } => Action::Send { to, from: span },
        Kind::Receive { from } => Action::Receive { from, into: span, reduce: None },
        Kind::Group(_) => return Plan { steps: Vec::new(), scratch: 0 },
    };
    Plan { steps: vec![Step { action, after: Vec::new() }], scratch: 0 }
}
