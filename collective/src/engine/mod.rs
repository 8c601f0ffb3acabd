//! The engine: carries out plans over links. It does no I/O of its own, starts no thread, and reads no clock:
//! the time is an argument.
//!
//! ```text
//!   start(call, memory) ──▶ waiting ──▶ under way ──▶ finished ──▶ take(id)
//!                           (more than 64 are)  │ progress(): one round of polls at all links
//!                                               ▼
//!                                       the first failure ends all operations, and all later ones
//! ```
//!
//! Operations overlap. Links keep the order of operations: a link carries the messages of an operation before
//! those of the next, so an operation uses a link once no earlier one needs it.
//!
//! [`short`] is the path of an all-reduce of few elements while no other operation is under way. All others
//! run [`program`]s, which are compiled [plans](crate::plan) and are kept for the next call with the same
//! arguments.

mod call;
mod in_flight;
mod program;
mod programs;
mod short;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::task::Waker;
use std::time::{Duration, Instant};

use self::in_flight::{BusyLinks, Context, Execution, Fault, InFlightOperation, Planned, StepWatch, check};
use self::programs::Programs;
use self::short::ShortOperation;
use crate::error::{CollectiveError, OperationStep, argument};
use crate::link::{RankLinks, Tag};
use crate::plan::{Algorithm, Collective, Hosts};
use crate::reduce::Kernel;
use tonic_rdma::unstable::wake_all;

pub(crate) use self::call::{Call, Kind};
pub(crate) use self::in_flight::{CallerMemory, ForeignMemory, LentSlices, OperationId};

/// The largest number of operations of the group that use the links at once. Later ones wait.
const MOST_UNDER_WAY: usize = 64;
/// The largest number of operations that have not finished.
const MOST_WAITING: usize = 65_536;

/// The number of the first operation of the set-up. Messages have 40 bits of a number, and restore it from
/// the one before.
const SET_UP: u64 = 1 << 32;

/// Returns registered memory of at least the given number of bytes.
pub(crate) type Supply<M> = Box<dyn FnMut(usize) -> Result<M, CollectiveError> + Send>;

/// The operations of one rank.
pub(crate) struct Engine<L: RankLinks> {
    rank: usize,
    ranks: usize,
    /// On which host each rank is. Equal on all ranks, and set before the first operation.
    pub(crate) hosts: Hosts,
    pub(crate) links: L,
    supply: Supply<L::Memory>,
    programs: Programs,
    /// In the order of their start.
    in_flight: VecDeque<InFlightOperation<L::Memory>>,
    /// The operations that have ended, and were not taken yet.
    finished: Vec<(OperationId, Ended<L::Memory>)>,
    /// Memory that peers may still read from after a failure.
    kept: Vec<L::Memory>,
    /// Memory of operations whose caller has dropped them. It may be the caller's own, so it is dropped outside the
    /// engine's lock.
    unwanted: Vec<CallerMemory<L::Memory>>,
    numbers: Numbers,
    ids: u64,
    failure: Option<CollectiveError>,
    /// Whether an operation has returned the failure itself. Later ones return that an earlier operation
    /// failed.
    failure_returned: bool,
    busy: BusyLinks,
    sum: Vec<u8>,
    last_short: Option<(Call, u64, Kernel)>,
    /// The step of this rank, and the rank that it waits for, as of the last time that deadlines were
    /// checked.
    pub(crate) position: (OperationStep, Option<usize>),
    late: Option<Late>,
    /// Whether the caller finds the cause of a deadline, and then calls `expire`. Such an operation stays
    /// under way until then.
    pub(crate) asks: bool,
    pub(crate) statistics: Statistics,
    /// Called before each step of each operation, before a step that must wait also more than once. No
    /// operation takes the short path then: it has the same messages, and no steps.
    pub(crate) watch: Option<StepWatch>,
    /// Whether the operations are those of the set-up, by which the ranks agree on their plans. A number
    /// alone does not say so, because later operations may reach the numbers of the set-up.
    pub(crate) sets_up: bool,
}

/// The result of an operation, and its memory.
pub(crate) type Ended<M> = (Result<(), CollectiveError>, CallerMemory<M>);

/// What an engine has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Statistics {
    pub(crate) operations: u64,
    /// Operations that took the short path from start to end.
    pub(crate) short: u64,
    /// Bytes copied within this rank: to staging memory, and from there. Reductions and inline messages do
    /// not count.
    pub(crate) copied: u64,
}

/// Arguments of an operation, apart from its memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    pub(crate) call: Call,
    /// The elements that Input has, if it is not the same memory as Out; in elements of the whole.
    pub(crate) input: Option<(usize, usize)>,
    /// The elements that Out has.
    pub(crate) out: (usize, usize),
    pub(crate) limit: Duration,
}

impl<L: RankLinks> Engine<L> {
    pub(crate) fn new(rank: usize, ranks: usize, links: L, supply: Supply<L::Memory>) -> Self {
        Self {
            rank,
            ranks,
            hosts: Hosts::default(),
            sum: Vec::with_capacity(links.inline()),
            links,
            supply,
            programs: Programs::default(),
            in_flight: VecDeque::new(),
            finished: Vec::new(),
            kept: Vec::new(),
            unwanted: Vec::new(),
            numbers: Numbers::new(ranks),
            ids: 0,
            failure: None,
            failure_returned: false,
            busy: BusyLinks { sends: vec![false; ranks], receives: vec![false; ranks] },
            last_short: None,
            position: (OperationStep::default(), None),
            late: None,
            asks: false,
            statistics: Statistics::default(),
            watch: None,
            sets_up: false,
        }
    }

    /// Carries out an all-reduce on the short path, if the path is open to it and the other ranks answer
    /// while `spins` returns true, which is called after polls without effect.
    ///
    /// `own` are the elements of this rank; without it, they are in `out`. Returns `None` if the path is not
    /// open: then nothing has happened.
    #[inline]
    pub(crate) fn short(
        &mut self,
        request: &Request,
        own: Option<&[u8]>,
        out: &mut [u8],
        mut spins: impl FnMut() -> bool,
    ) -> Option<ShortResult> {
        if !self.in_flight.is_empty() || self.failure.is_some() || self.watch.is_some() {
            return None;
        }
        let (packed, kernel) = match self.last_short {
            Some((call, packed, kernel)) if call == request.call => (packed, kernel),
            _ => {
                let packed = request.call.pack();
                let kernel = self.short_kernel(&request.call)?;
                self.last_short = Some((request.call, packed, kernel));
                (packed, kernel)
            }
        };
        let number = self.numbers.group;
        let tag = Tag { operation: number, step: 0, call: packed };
        let span = request.call.span(self.ranks);
        let mut short = ShortOperation::new(self.rank, self.ranks);
        let fault = loop {
            match short.poll(&mut self.links, &mut self.sum, &kernel, tag, own, out) {
                Ok(_) if short.is_done() => {
                    self.numbers.group += 1;
                    self.statistics.operations += 1;
                    self.statistics.short += 1;
                    return Some(ShortResult::Done);
                }
                Ok(true) => std::hint::spin_loop(),
                Ok(false) if spins() => {}
                Ok(false) => break None,
                Err(fault) => break Some(fault),
            }
            if let Err(error) = self.links.progress() {
                break Some(error.into());
            }
        };
        self.numbers.group += 1;
        let execution = Execution::Short(short);
        let id = self.push(request, number, packed, Some(kernel), CallerMemory::Borrowed, execution, span);
        if let Some(fault) = fault {
            self.fail_at(self.in_flight.len() - 1, fault);
        }
        Some(ShortResult::UnderWay(id))
    }

    fn short_kernel(&self, call: &Call) -> Option<Kernel> {
        let size = call.dtype.size()?;
        let fits = call.kind == Kind::Group(Collective::AllReduce)
            && call.algorithm == Algorithm::OneShot
            && self.ranks > 1
            && call.elements > 0
            && call.elements <= call.chunk
            && call.elements <= self.links.inline() / size;
        if !fits {
            return None;
        }
        Kernel::of(call.dtype, call.reduction?).ok()
    }

    /// Gives an operation of the short path its memory. Operations of slices have theirs lent.
    pub(crate) fn adopt(&mut self, id: OperationId, memory: CallerMemory<L::Memory>) {
        if let Some(operation) = self.in_flight.iter_mut().find(|operation| operation.id == id) {
            operation.memory = memory;
        } else if let Some((_, ended)) = self.finished.iter_mut().find(|(finished, _)| *finished == id) {
            ended.1 = memory;
        }
    }

    #[allow(clippy::too_many_arguments, reason = "the parts of an operation")]
    fn push(
        &mut self,
        request: &Request,
        number: u64,
        packed: u64,
        kernel: Option<Kernel>,
        memory: CallerMemory<L::Memory>,
        execution: Execution<L::Memory>,
        span: tracing::Span,
    ) -> OperationId {
        let id = OperationId(self.ids);
        self.ids += 1;
        self.statistics.operations += 1;
        self.in_flight.push_back(InFlightOperation {
            id,
            number,
            call: request.call,
            packed,
            kernel,
            memory,
            execution,
            limit: request.limit,
            started: None,
            waker: None,
            neglected: false,
            detached: false,
            span,
        });
        id
    }

    /// Starts an operation. `progress` carries it out.
    ///
    /// # Errors
    /// The arguments do not fit, or the group has failed. The memory comes back.
    pub(crate) fn start(
        &mut self,
        request: &Request,
        memory: CallerMemory<L::Memory>,
    ) -> Result<OperationId, (CollectiveError, CallerMemory<L::Memory>)> {
        let (program, kernel) = match self.prepare(request, &memory) {
            Ok(prepared) => prepared,
            Err(error) => return Err((error, memory)),
        };
        if let Some(error) = self.refusal() {
            return Err((error, memory));
        }
        let number = self.numbers.next(request.call.kind);
        let packed = request.call.pack();
        let (execution, span) = (Execution::Planned(Planned::new(program)), request.call.span(self.ranks));
        Ok(self.push(request, number, packed, kernel, memory, execution, span))
    }

    /// Sets the deadline of an operation. It counts from the start.
    pub(crate) fn set_limit(&mut self, id: OperationId, limit: Duration) {
        if let Some(operation) = self.in_flight.iter_mut().find(|operation| operation.id == id) {
            operation.limit = limit;
        }
    }

    fn refusal(&mut self) -> Option<CollectiveError> {
        if let Some(failure) = &self.failure {
            if !std::mem::replace(&mut self.failure_returned, true) {
                return Some(failure.clone());
            }
            return Some(CollectiveError::revoked(failure));
        }
        (self.in_flight.len() >= MOST_WAITING).then(|| {
            argument(format!("{MOST_WAITING} operations wait already; await some before starting more"))
        })
    }

    /// Carries out one round of polls at all links. With `lent`, the operation of these slices can move on
    /// too. With `now`, deadlines are checked. Returns whether something moved.
    pub(crate) fn progress(
        &mut self,
        now: Option<Instant>,
        mut lent: Option<(OperationId, LentSlices<'_>)>,
    ) -> bool {
        if self.in_flight.is_empty() {
            return false;
        }
        if let Err(error) = self.links.progress() {
            self.fail_at(0, error.into());
            return true;
        }
        self.busy.clear();
        let mut moved = false;
        let mut at = 0;
        let mut of_group = 0;
        while at < self.in_flight.len() && of_group < MOST_UNDER_WAY {
            let operation = &mut self.in_flight[at];
            let is_busy = match operation.call.kind {
                // Messages between two ranks wait for earlier ones on the same link only.
                Kind::Send { to } => self.busy.sends[to],
                Kind::Receive { from } => self.busy.receives[from],
                Kind::Group(_) => {
                    of_group += 1;
                    false
                }
            };
            if is_busy {
                at += 1;
                continue;
            }
            if let Err(error) = begin(operation, &mut self.supply) {
                self.fail_at(at, Fault::Error(error));
                return true;
            }
            let mine = lent.as_ref().is_some_and(|(id, _)| *id == operation.id);
            let mut slices = if mine { lent.take().map(|(_, lent)| lent) } else { None };
            let has_memory = mine || !matches!(operation.memory, CallerMemory::Borrowed);
            let mut context = Context {
                links: &mut self.links,
                busy: &mut self.busy,
                ranks: self.ranks,
                sum: &mut self.sum,
                watch: self.watch.as_mut(),
            };
            match operation.advance(&mut context, slices.as_mut().map(LentSlices::again)) {
                Ok(advanced) => moved |= advanced,
                Err(fault) => {
                    self.fail_at(at, fault);
                    return true;
                }
            }
            if operation.is_done() && (has_memory || !operation.ends_with_memory()) {
                if let Err(fault) = operation.end(slices) {
                    self.fail_at(at, fault);
                    return true;
                }
                self.finish(at, Ok(()));
                moved = true;
                continue;
            }
            at += 1;
        }
        if let Some(now) = now {
            self.check_time(now);
        }
        moved
    }

    fn finish(&mut self, at: usize, result: Result<(), CollectiveError>) {
        let Some(operation) = self.in_flight.remove(at) else { return };
        if self.in_flight.is_empty() {
            self.position = (self.idle_step(), None);
        }
        if let Execution::Planned(planned) = &operation.execution {
            self.statistics.copied += planned.program.copied as u64;
        }
        self.deliver(operation, result);
    }

    fn deliver(&mut self, operation: InFlightOperation<L::Memory>, result: Result<(), CollectiveError>) {
        wake_all(operation.waker);
        if let Err(error) = &result {
            operation.span.in_scope(|| tracing::debug!(%error, "a collective operation has failed"));
        }
        if operation.detached {
            self.unwanted.push(operation.memory);
        } else {
            self.finished.push((operation.id, (result, operation.memory)));
        }
    }

    /// Returns the first failure.
    pub(crate) fn failure(&self) -> Option<&CollectiveError> {
        self.failure.as_ref()
    }

    /// Takes the result of an operation that has ended, and its memory.
    pub(crate) fn take(&mut self, id: OperationId) -> Option<Ended<L::Memory>> {
        let at = self.finished.iter().position(|(finished, _)| *finished == id)?;
        Some(self.finished.swap_remove(at).1)
    }

    /// Wakes `waker` when the operation has ended, or when it needs its slices.
    pub(crate) fn wake(&mut self, id: OperationId, waker: &Waker) {
        if let Some(operation) = self.in_flight.iter_mut().find(|operation| operation.id == id) {
            match &mut operation.waker {
                Some(old) => old.clone_from(waker),
                none => *none = Some(waker.clone()),
            }
        }
    }

    /// Returns whether an operation is under way on the short path, and all messages of this rank have left.
    pub(crate) fn has_sent(&self, id: OperationId) -> bool {
        self.in_flight.iter().rev().any(|operation| {
            operation.id == id && matches!(&operation.execution, Execution::Short(short) if short.has_sent())
        })
    }

    /// Lets an operation go on without anybody who takes its result. One whose memory is lent can't go on: it
    /// ends the group. Returns what an operation that has ended leaves.
    pub(crate) fn forget(&mut self, id: OperationId) -> Option<Ended<L::Memory>> {
        let Some(at) = self.in_flight.iter().position(|operation| operation.id == id) else {
            return self.take(id);
        };
        let operation = &mut self.in_flight[at];
        operation.detached = true;
        let is_lent = match &operation.memory {
            CallerMemory::Owned { .. } => false,
            CallerMemory::Foreign(memory) => memory.is_lent(),
            CallerMemory::Borrowed => true,
        };
        if is_lent {
            let what = format!(
                "{} (operation {}) was dropped before its end, and its elements belong to their owner again: wait for \
                 the end of such operations first, or use a Buffer",
                operation.call, operation.number
            );
            self.fail_all(at, argument(what));
            // No caller has got this error.
            self.failure_returned = false;
        }
        None
    }

    /// Counts operations from a large number on, until [`restart_numbers`](Self::restart_numbers). Another
    /// rank may end the set-up earlier and start its operation 0. Its messages have other numbers than those
    /// of the set-up, so this rank does not report them as calls that differ.
    pub(crate) fn number_set_up(&mut self) {
        (self.numbers.group, self.sets_up) = (SET_UP, true);
    }

    /// Counts operations from 0 again. All ranks do this after the same operation, when none is under way.
    pub(crate) fn restart_numbers(&mut self) {
        debug_assert!(self.in_flight.is_empty(), "operations are under way");
        (self.numbers, self.sets_up) = (Numbers::new(self.ranks), false);
        self.statistics = Statistics::default();
    }

    /// Returns whether no operation is under way.
    pub(crate) fn is_idle(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// Takes the memory of operations that were dropped and have ended.
    pub(crate) fn take_unwanted(&mut self) -> Vec<CallerMemory<L::Memory>> {
        std::mem::take(&mut self.unwanted)
    }

    /// Takes the memory that peers may still read from after a failure.
    pub(crate) fn take_kept(&mut self) -> Vec<L::Memory> {
        std::mem::take(&mut self.kept)
    }
}

/// The numbers of operations. Messages of a group have one sequence of numbers; messages from one rank to
/// another have one for each direction, because only these two ranks make the calls.
#[derive(Debug)]
struct Numbers {
    group: u64,
    sends: Vec<u64>,
    receives: Vec<u64>,
}

impl Numbers {
    fn new(ranks: usize) -> Self {
        Self { group: 0, sends: vec![0; ranks], receives: vec![0; ranks] }
    }

    /// Returns the number of the next operation of this kind.
    fn next(&mut self, kind: Kind) -> u64 {
        let number = match kind {
            Kind::Group(_) => &mut self.group,
            Kind::Send { to } => &mut self.sends[to],
            Kind::Receive { from } => &mut self.receives[from],
        };
        *number += 1;
        *number - 1
    }
}

/// The result of the short path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ShortResult {
    Done,
    /// The operation goes on, or has failed.
    UnderWay(OperationId),
}

impl LentSlices<'_> {
    fn again(&mut self) -> LentSlices<'_> {
        LentSlices { input: self.input, out: self.out }
    }
}

/// Gives an operation its staging and scratch memory.
fn begin<M>(operation: &mut InFlightOperation<M>, supply: &mut Supply<M>) -> Result<(), CollectiveError> {
    let Execution::Planned(planned) = &mut operation.execution else { return Ok(()) };
    if planned.begun {
        return Ok(());
    }
    if planned.program.staging > 0 {
        planned.staging = Some(supply(planned.program.staging)?);
    }
    if planned.program.scratch > 0 {
        planned.scratch = Some(supply(planned.program.scratch)?);
    }
    planned.begun = true;
    Ok(())
}

/// An operation whose deadline has passed, and the rank that it waits for.
#[derive(Debug)]
struct Late {
    id: OperationId,
    rank: usize,
    reported: bool,
}

impl<L: RankLinks> Engine<L> {
    /// Finds messages of another call, also on links on which no message is due. Ranks that made different
    /// calls carry out different plans, and would wait for one another.
    fn find_mismatch(&mut self) -> Option<(usize, Fault)> {
        for from in (0..self.ranks).filter(|from| *from != self.rank) {
            // A link that has failed is found elsewhere.
            let Ok(Some((tag, _))) = self.links.peek(from) else { continue };
            let of_group = |operation: &InFlightOperation<_>| matches!(operation.call.kind, Kind::Group(_));
            let mut candidates =
                self.in_flight.iter().enumerate().filter(|(_, operation)| of_group(operation));
            if let Some((at, operation)) = candidates.find(|(_, operation)| operation.number == tag.operation)
                && operation.packed != tag.call
            {
                let due = Tag { operation: operation.number, step: 0, call: operation.packed };
                return check(from, &due, &tag, 0, 0, 0, 0).err().map(|fault| (at, fault));
            }
        }
        None
    }

    /// Fails the operations whose deadline has passed, and says where this rank is.
    fn check_time(&mut self, now: Instant) {
        if let Some((at, fault)) = self.find_mismatch() {
            return self.fail_at(at, fault);
        }
        let mut late = None;
        for (at, operation) in self.in_flight.iter_mut().enumerate() {
            let started = *operation.started.get_or_insert(now);
            if late.is_none() && now.saturating_duration_since(started) >= operation.limit {
                late = Some(at);
            }
        }
        // If no operation waits for a rank, the late one waits for its own future to be polled.
        let Some(first) = self.in_flight.iter().find(|operation| operation.waits_for().is_some()) else {
            if let Some(at) = late {
                self.fail_late(at, self.rank);
            }
            return;
        };
        // The others wait for the first operation that waits. This rank is at fault if that operation waits
        // for its own future.
        let neglected = first.neglected;
        let (step, waits_for) = (first.at(), first.waits_for());
        let waits_for = waits_for.filter(|_| !neglected);
        self.position = (step, waits_for);
        if let Some(at) = late {
            let operation = &self.in_flight[at];
            let waits_for = operation.waits_for().filter(|_| !neglected).or(waits_for);
            if self.asks
                && let Some(rank) = waits_for
            {
                self.late.get_or_insert(Late { id: operation.id, rank, reported: false });
                return;
            }
            self.fail_late(at, waits_for.unwrap_or(self.rank));
        }
    }

    /// Fails an operation whose deadline has passed. `culprit` is this rank if its own future was not polled.
    fn fail_late(&mut self, at: usize, culprit: usize) {
        let operation = &self.in_flight[at];
        let error = CollectiveError::deadline(culprit, operation.at(), operation.limit);
        self.fail_at(at, Fault::Error(error));
    }

    /// Returns the operation whose deadline has passed, and the rank that it waits for. Each comes once.
    pub(crate) fn take_late(&mut self) -> Option<(OperationId, usize)> {
        let late = self.late.as_mut().filter(|late| !late.reported)?;
        late.reported = true;
        Some((late.id, late.rank))
    }

    /// Fails an operation whose deadline has passed, because of `culprit`.
    pub(crate) fn expire(&mut self, id: OperationId, culprit: usize) {
        self.late = None;
        if let Some(at) = self.in_flight.iter().position(|operation| operation.id == id) {
            self.fail_late(at, culprit);
        }
    }

    /// Ends all operations, because the one at `at` failed.
    fn fail_at(&mut self, at: usize, fault: Fault) {
        let step = self.in_flight.get(at).map(InFlightOperation::at);
        let error = fault.into_error(step.unwrap_or_else(|| self.idle_step()));
        self.fail_all(at, error);
    }

    fn fail_all(&mut self, first: usize, error: CollectiveError) {
        self.failure.get_or_insert_with(|| error.clone());
        let revoked = CollectiveError::revoked(&error);
        for (at, mut operation) in std::mem::take(&mut self.in_flight).into_iter().enumerate() {
            let result = if at == first { error.clone() } else { revoked.clone() };
            self.failure_returned = true;
            if let Execution::Planned(planned) = &mut operation.execution
                && planned.has_outstanding()
            {
                self.kept.extend(planned.staging.take());
                self.kept.extend(planned.scratch.take());
                keep(&mut operation.memory, &mut self.supply, &mut self.kept);
            }
            self.deliver(operation, Err(result));
        }
    }

    /// Ends all operations because of an event outside the links. Only the first failure counts.
    pub(crate) fn fail(&mut self, error: CollectiveError) {
        if self.failure.is_none() {
            self.fail_all(0, error);
        }
    }

    fn idle_step(&self) -> OperationStep {
        OperationStep { operation: self.numbers.group, step: 0, steps: 0 }
    }
}

/// Exchanges the memory of a failed operation for copies, because a peer may still read from it, and the
/// caller may change what comes back. Where there is no memory for a copy, nothing comes back.
fn keep<M: std::ops::DerefMut<Target = [u8]>>(
    memory: &mut CallerMemory<M>,
    supply: &mut Supply<M>,
    kept: &mut Vec<M>,
) {
    let CallerMemory::Owned { input, out } = memory else { return };
    for memory in [input, out] {
        let Some(old) = memory.take() else { continue };
        if let Ok(mut new) = supply(old.len()) {
            let length = old.len().min(new.len());
            new[..length].copy_from_slice(&old[..length]);
            *memory = Some(new);
        }
        kept.push(old);
    }
}
