//! One operation in flight: its memories, and what it shares with others in a round of polls.

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::ops::DerefMut;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use super::call::{Call, Packed};
use super::program::{Address, Copy, MemoryRole, Part, Program, Work};
use super::short::ShortOperation;
use crate::error::{CollectiveError, OperationStep, argument};
use crate::link::{LinkError, LinkFault, RankLinks, Tag};
use crate::reduce::Kernel;

/// An operation of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct OperationId(pub(super) u64);

/// The caller's memory while an operation is under way.
#[derive(Debug)]
pub(crate) enum CallerMemory<M> {
    /// Registered memory, which the engine has until the end. Without `input`, the operation is in place.
    Owned { input: Option<M>, out: Option<M> },
    /// Memory that peers can't read, which the engine has until the end.
    Foreign(Box<dyn ForeignMemory>),
    /// Slices, which the caller lends to each call of [`progress`](super::Engine::progress).
    Borrowed,
}

/// Slices that the caller lends to a call.
#[derive(Debug)]
pub(crate) struct LentSlices<'a> {
    pub(crate) input: Option<&'a [u8]>,
    pub(crate) out: &'a mut [u8],
}

/// An operand whose memory peers can't read.
pub(crate) trait ForeignMemory: Send {
    /// Returns its bytes, or `None` if it has not the length that it had first.
    fn lend(&mut self) -> Option<LentSlices<'_>>;

    /// Returns whether its owner may use the memory again once the operation is dropped.
    fn is_lent(&self) -> bool;

    /// Returns the operand, so that its owner gets it back.
    fn into_any(self: Box<Self>) -> Box<dyn Any>;
}

impl fmt::Debug for dyn ForeignMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ForeignMemory")
    }
}

#[derive(Debug)]
pub(super) struct InFlightOperation<M> {
    pub(super) id: OperationId,
    /// The number of the operation in the tags of its messages.
    pub(super) number: u64,
    pub(super) call: Call,
    pub(super) packed: u64,
    pub(super) kernel: Option<Kernel>,
    pub(super) memory: CallerMemory<M>,
    pub(super) execution: Execution<M>,
    pub(super) limit: Duration,
    /// When the clock was first read for this operation. The deadline counts from here.
    pub(super) started: Option<Instant>,
    pub(super) waker: Option<Waker>,
    /// Whether the operation has work that only its own future can do, because its elements lie in slices.
    pub(super) neglected: bool,
    /// Whether the operation has no future any more, so that its result is dropped.
    pub(super) detached: bool,
    pub(super) span: tracing::Span,
}

/// How an operation is carried out.
#[derive(Debug)]
pub(super) enum Execution<M> {
    Planned(Planned<M>),
    Short(ShortOperation),
}

/// How far an operation has carried out its program.
#[derive(Debug)]
pub(super) struct Planned<M> {
    pub(super) program: Arc<Program>,
    pub(super) staging: Option<M>,
    pub(super) scratch: Option<M>,
    /// Whether Staging and Scratch are allocated.
    pub(super) begun: bool,
    /// How many steps each step still waits for.
    waits: Vec<u32>,
    /// Local steps that may run.
    locals: VecDeque<u32>,
    done: usize,
    peers: Vec<Cursor>,
}

/// How far the steps between this rank and one other are.
#[derive(Debug, Default)]
struct Cursor {
    sends: usize,
    receives: usize,
    /// References that the peer has not taken: the numbers of the messages, and the steps.
    outstanding: VecDeque<(u64, u32)>,
}

impl<M> Planned<M> {
    pub(super) fn new(program: Arc<Program>) -> Self {
        let locals = (0..program.steps.len() as u32)
            .filter(|&step| program.waits[step as usize] == 0 && program.steps[step as usize].is_local())
            .collect();
        Self {
            waits: program.waits.clone(),
            locals,
            peers: program.peers.iter().map(|_| Cursor::default()).collect(),
            program,
            staging: None,
            scratch: None,
            begun: false,
            done: 0,
        }
    }

    fn complete(&mut self, step: u32) {
        self.done += 1;
        for &next in &self.program.then[step as usize] {
            let waits = &mut self.waits[next as usize];
            *waits -= 1;
            if *waits == 0 && self.program.steps[next as usize].is_local() {
                self.locals.push_back(next);
            }
        }
    }

    pub(super) fn is_done(&self) -> bool {
        self.done == self.program.steps.len()
    }

    pub(super) fn has_outstanding(&self) -> bool {
        self.peers.iter().any(|peer| !peer.outstanding.is_empty())
    }

    /// Returns the rank that this rank waits for: that of the earliest step that could be carried out. Others
    /// may be possible, such as a receive whose message waits for the earlier steps of this rank.
    fn waits_for(&self) -> Option<usize> {
        let possible = |step: Option<&u32>| step.copied().filter(|&step| self.waits[step as usize] == 0);
        let steps = self.program.peers.iter().zip(&self.peers).flat_map(|(peer, cursor)| {
            let sent = cursor.outstanding.front().map(|(_, step)| *step);
            let next =
                [peer.receives.get(cursor.receives), peer.sends.get(cursor.sends)].map(possible).into_iter();
            next.chain([sent]).flatten().map(|step| (step, peer.rank))
        });
        steps.min().map(|(_, rank)| rank)
    }

    /// Returns the lowest step that is not done, for messages about the operation.
    fn first_open(&self) -> u32 {
        let open = self.program.peers.iter().zip(&self.peers).flat_map(|(peer, cursor)| {
            let send = cursor.outstanding.front().map(|(_, step)| *step);
            [send, peer.sends.get(cursor.sends).copied(), peer.receives.get(cursor.receives).copied()]
        });
        open.flatten().min().unwrap_or(self.done as u32)
    }

    /// Marks the links that this operation still needs.
    fn mark(&self, busy: &mut BusyLinks) {
        for (peer, cursor) in self.program.peers.iter().zip(&self.peers) {
            busy.sends[peer.rank] |= cursor.sends < peer.sends.len();
            busy.receives[peer.rank] |= cursor.receives < peer.receives.len();
        }
    }
}

impl<M: DerefMut<Target = [u8]>> InFlightOperation<M> {
    /// Moves on as far as the links allow. Returns whether it moved.
    pub(super) fn advance<L: RankLinks<Memory = M>>(
        &mut self,
        context: &mut Context<'_, L>,
        lent: Option<LentSlices<'_>>,
    ) -> Result<bool, Fault> {
        let tag = Tag { operation: self.number, step: 0, call: self.packed };
        let borrowed = matches!(self.memory, CallerMemory::Borrowed);
        let absent = borrowed && lent.is_none();
        let (input, out) = input_and_out(&mut self.memory, lent)?;
        self.neglected = false;
        match &mut self.execution {
            Execution::Planned(planned) => {
                let moved = planned.taken(context.links)?;
                if absent || !planned.begun {
                    planned.mark(context.busy);
                    self.neglected = absent && planned.has_work(context.links);
                    if absent && planned.could_move(context) {
                        self.waker.take().inspect(Waker::wake_by_ref);
                    }
                    return Ok(moved);
                }
                let (mut staging, mut scratch) = (planned.staging.take(), planned.scratch.take());
                let mut run = Run {
                    planned,
                    memories: MemoryRefs([
                        input,
                        out,
                        MemoryRef::of(&mut staging),
                        MemoryRef::of(&mut scratch),
                    ]),
                    kernel: self.kernel.as_ref(),
                    tag,
                    delivered: false,
                };
                let result = run.steps(context);
                planned.staging = staging;
                planned.scratch = scratch;
                Ok(moved | result?)
            }
            Execution::Short(short) => {
                if absent {
                    short.mark(context.busy);
                    if short.could_move(context.links) {
                        self.waker.take().inspect(Waker::wake_by_ref);
                    }
                    return Ok(false);
                }
                let kernel = self.kernel.as_ref();
                let length = self.call.elements * self.call.dtype.size().unwrap_or_default();
                short.advance(context, kernel, tag, &input, out, length)
            }
        }
    }

    /// Copies the elements that no step has written to Out. Called once, after the last step.
    pub(super) fn end(&mut self, lent: Option<LentSlices<'_>>) -> Result<(), Fault> {
        let (input, out) = input_and_out(&mut self.memory, lent)?;
        if let Execution::Planned(planned) = &mut self.execution {
            let staging = MemoryRef::of(&mut planned.staging);
            let mut memories = MemoryRefs([input, out, staging, MemoryRef::Empty]);
            for copy in &planned.program.outs {
                memories.copy(copy);
            }
        }
        Ok(())
    }

    /// Returns whether the end needs the caller's memory.
    pub(super) fn ends_with_memory(&self) -> bool {
        matches!(&self.execution, Execution::Planned(planned) if !planned.program.outs.is_empty())
    }

    pub(super) fn is_done(&self) -> bool {
        match &self.execution {
            Execution::Planned(planned) => planned.is_done(),
            Execution::Short(short) => short.is_done(),
        }
    }

    pub(super) fn at(&self) -> OperationStep {
        let (step, steps) = match &self.execution {
            Execution::Planned(planned) => (planned.first_open(), planned.program.steps.len() as u32),
            Execution::Short(short) => (short.step(), short.steps()),
        };
        OperationStep { operation: self.number, step, steps }
    }

    pub(super) fn waits_for(&self) -> Option<usize> {
        match &self.execution {
            Execution::Planned(planned) => planned.waits_for(),
            Execution::Short(short) => short.waits_for(),
        }
    }
}

/// Returns the references to Input and Out.
fn input_and_out<'a, M>(
    memory: &'a mut CallerMemory<M>,
    lent: Option<LentSlices<'a>>,
) -> Result<(MemoryRef<'a, M>, MemoryRef<'a, M>), Fault> {
    let lent = match memory {
        CallerMemory::Owned { input, out } => return Ok((MemoryRef::of(input), MemoryRef::of(out))),
        CallerMemory::Foreign(memory) => {
            let changed = || argument("the memory of an operation has another length than at its start");
            Some(memory.lend().ok_or_else(|| Fault::Error(changed()))?)
        }
        CallerMemory::Borrowed => lent,
    };
    Ok(match lent {
        Some(lent) => (lent.input.map_or(MemoryRef::Empty, MemoryRef::ReadOnly), MemoryRef::Slice(lent.out)),
        None => (MemoryRef::Empty, MemoryRef::Empty),
    })
}

impl<M> Planned<M> {
    /// Notes the references that peers have taken.
    fn taken<L: RankLinks>(&mut self, links: &mut L) -> Result<bool, Fault> {
        let mut moved = false;
        for at in 0..self.peers.len() {
            if self.peers[at].outstanding.is_empty() {
                continue;
            }
            let taken = links.taken(self.program.peers[at].rank)?;
            while let Some(&(number, step)) = self.peers[at].outstanding.front()
                && number < taken
            {
                self.peers[at].outstanding.pop_front();
                self.complete(step);
                moved = true;
            }
        }
        Ok(moved)
    }

    /// Returns whether a local step, or a message that has arrived, waits for the memory of this operation.
    fn has_work<L: RankLinks>(&self, links: &mut L) -> bool {
        !self.locals.is_empty()
            || self.program.peers.iter().zip(&self.peers).any(|(peer, cursor)| {
                peer.receives.get(cursor.receives).is_some_and(|&step| self.waits[step as usize] == 0)
                    && matches!(links.peek(peer.rank), Ok(Some(_)))
            })
    }

    /// Returns whether this operation could move on if its memory were here.
    fn could_move<L: RankLinks>(&self, context: &mut Context<'_, L>) -> bool {
        !self.locals.is_empty()
            || self.is_done()
            || self.program.peers.iter().zip(&self.peers).any(|(peer, cursor)| {
                let ready = |step: Option<&u32>| step.is_some_and(|&step| self.waits[step as usize] == 0);
                ready(peer.sends.get(cursor.sends))
                    || ready(peer.receives.get(cursor.receives))
                        && !matches!(context.links.peek(peer.rank), Ok(None))
            })
    }
}

struct Run<'a, M> {
    planned: &'a mut Planned<M>,
    memories: MemoryRefs<'a, M>,
    kernel: Option<&'a Kernel>,
    tag: Tag,
    /// Whether a part of a message was delivered.
    delivered: bool,
}

impl<M: DerefMut<Target = [u8]>> Run<'_, M> {
    fn steps<L: RankLinks<Memory = M>>(&mut self, context: &mut Context<'_, L>) -> Result<bool, Fault> {
        let mut moved = false;
        loop {
            let mut again = false;
            for at in 0..self.planned.peers.len() {
                again |= self.sends(at, context)?;
            }
            if let Some(step) = self.planned.locals.pop_front() {
                context.at(&self.tag, step, &self.planned.program);
                self.local(step, context.ranks);
                moved = true;
                continue;
            }
            for at in 0..self.planned.peers.len() {
                again |= self.receives(at, context)?;
            }
            moved |= again;
            if !again {
                break;
            }
        }
        self.planned.mark(context.busy);
        Ok(moved | self.delivered)
    }

    fn sends<L: RankLinks<Memory = M>>(
        &mut self,
        at: usize,
        context: &mut Context<'_, L>,
    ) -> Result<bool, Fault> {
        let mut moved = false;
        let program = Arc::clone(&self.planned.program);
        let peer = &program.peers[at];
        if context.busy.sends[peer.rank] {
            return Ok(false);
        }
        while let Some(&step) = peer.sends.get(self.planned.peers[at].sends)
            && self.planned.waits[step as usize] == 0
            && let Work::Send { to, from, length, inline } = &program.steps[step as usize]
        {
            let tag = Tag { step, ..self.tag };
            context.at(&tag, step, &program);
            if *inline {
                if !context.links.send(*to, tag, self.memories.bytes(*from, *length))? {
                    break;
                }
                self.planned.complete(step);
            } else {
                let Some(memory) = self.memories.registered(from.role) else {
                    return Err(broken(&self.tag, step, "a message lies in memory that is not registered"));
                };
                let Some(number) = context.links.send_reference(*to, tag, memory, from.at, *length)? else {
                    break;
                };
                self.planned.peers[at].outstanding.push_back((number, step));
            }
            self.planned.peers[at].sends += 1;
            moved = true;
        }
        Ok(moved)
    }

    fn receives<L: RankLinks<Memory = M>>(
        &mut self,
        at: usize,
        context: &mut Context<'_, L>,
    ) -> Result<bool, Fault> {
        let mut moved = false;
        let program = Arc::clone(&self.planned.program);
        let peer = &program.peers[at];
        if context.busy.receives[peer.rank] {
            return Ok(false);
        }
        while let Some(&step) = peer.receives.get(self.planned.peers[at].receives)
            && self.planned.waits[step as usize] == 0
            && let Work::Receive { from, length, parts, outs } = &program.steps[step as usize]
        {
            let Some((tag, arrived)) = context.links.peek(*from)? else { break };
            check(*from, &self.tag, &tag, *length, arrived, step, program.steps.len() as u32)?;
            context.at(&self.tag, step, &program);
            let done = match parts[..] {
                [part] if part.reduce.is_none() => {
                    context.links.receive_into(*from, self.memories.bytes_mut(part.into, part.length))?
                }
                _ => {
                    let (memories, kernel) = (&mut self.memories, self.kernel);
                    context.links.receive(*from, &mut |offset, chunk| {
                        memories.take(kernel, parts, offset, chunk);
                    })?
                }
            };
            if !done {
                self.delivered |= context.links.has_delivered();
                break;
            }
            for copy in outs {
                self.memories.copy(copy);
            }
            self.planned.peers[at].receives += 1;
            self.planned.complete(step);
            moved = true;
        }
        Ok(moved)
    }

    fn local(&mut self, step: u32, ranks: usize) {
        let program = Arc::clone(&self.planned.program);
        let outs = match &program.steps[step as usize] {
            Work::Local { parts, outs } => {
                for part in parts {
                    self.memories.local(self.kernel, part);
                }
                outs
            }
            Work::Finish { copies, ranges, outs } => {
                for copy in copies {
                    self.memories.copy(copy);
                }
                if let Some(kernel) = self.kernel {
                    for &(address, length) in ranges {
                        kernel.finish(self.memories.bytes_mut(address, length), ranks);
                    }
                }
                outs
            }
            Work::Send { .. } | Work::Receive { .. } => return,
        };
        for copy in outs {
            self.memories.copy(copy);
        }
        self.planned.complete(step);
    }
}

fn broken(tag: &Tag, step: u32, what: &str) -> Fault {
    let what = format!("internal error: operation {}, step {step}: {what}", tag.operation);
    Fault::Error(argument(what))
}

/// A reference to one memory of an operation.
#[derive(Debug)]
pub(crate) enum MemoryRef<'a, M> {
    Registered(&'a mut M),
    Slice(&'a mut [u8]),
    ReadOnly(&'a [u8]),
    Empty,
}

impl<M: DerefMut<Target = [u8]>> MemoryRef<'_, M> {
    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            Self::Registered(memory) => memory,
            Self::Slice(slice) => slice,
            Self::ReadOnly(slice) => slice,
            Self::Empty => &[],
        }
    }

    /// Returns the bytes for writing, or none if they may only be read.
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Registered(memory) => memory,
            Self::Slice(slice) => slice,
            Self::ReadOnly(_) | Self::Empty => &mut [],
        }
    }
}

impl<'a, M> MemoryRef<'a, M> {
    pub(super) fn of(memory: &'a mut Option<M>) -> Self {
        memory.as_mut().map_or(Self::Empty, Self::Registered)
    }
}

/// References to all memories of an operation, by [`MemoryRole`].
#[derive(Debug)]
pub(super) struct MemoryRefs<'a, M>(pub(super) [MemoryRef<'a, M>; 4]);

impl<M: DerefMut<Target = [u8]>> MemoryRefs<'_, M> {
    pub(super) fn bytes(&self, address: Address, length: usize) -> &[u8] {
        &self.0[address.role as usize].bytes()[address.at..address.at + length]
    }

    pub(super) fn bytes_mut(&mut self, address: Address, length: usize) -> &mut [u8] {
        &mut self.0[address.role as usize].bytes_mut()[address.at..address.at + length]
    }

    /// Returns the memory of a role, if it is registered.
    pub(super) fn registered(&self, role: MemoryRole) -> Option<&M> {
        match &self.0[role as usize] {
            MemoryRef::Registered(memory) => Some(memory),
            _ => None,
        }
    }

    pub(super) fn copy(&mut self, copy: &Copy) {
        if let Some((to, from)) = self.disjoint(copy.to.role, copy.from.role) {
            to[copy.to.at..copy.to.at + copy.length]
                .copy_from_slice(&from[copy.from.at..copy.from.at + copy.length]);
        }
    }

    /// Takes a chunk of a message, which starts `offset` bytes after its beginning.
    pub(super) fn take(&mut self, kernel: Option<&Kernel>, parts: &[Part], offset: usize, chunk: &[u8]) {
        let first = parts.partition_point(|part| part.offset + part.length <= offset);
        for part in &parts[first..] {
            let start = part.offset.max(offset);
            let end = (part.offset + part.length).min(offset + chunk.len());
            if start >= end {
                break;
            }
            let bytes = &chunk[start - offset..end - offset];
            let into = Address { role: part.into.role, at: part.into.at + (start - part.offset) };
            let reduce = part
                .reduce
                .map(|address| Address { role: address.role, at: address.at + (start - part.offset) });
            match (reduce, kernel) {
                (Some(with), Some(kernel)) => self.reduce(kernel, into, with, bytes),
                _ => self.bytes_mut(into, bytes.len()).copy_from_slice(bytes),
            }
        }
    }

    fn reduce(&mut self, kernel: &Kernel, into: Address, with: Address, bytes: &[u8]) {
        let length = bytes.len();
        if with == into {
            kernel.reduce(self.bytes_mut(into, length), bytes);
        } else if let Some((to, from)) = self.disjoint(into.role, with.role) {
            kernel.reduce_into(&mut to[into.at..into.at + length], &from[with.at..with.at + length], bytes);
        }
    }

    /// Carries out a part of a local step.
    pub(super) fn local(&mut self, kernel: Option<&Kernel>, part: &Part) {
        let (Some(with), Some(reduce), Some(kernel)) = (part.with, part.reduce, kernel) else { return };
        // The order of the two does not change a reduction's result.
        let other = if with == part.into {
            reduce
        } else {
            if reduce != part.into {
                self.copy(&Copy { from: reduce, to: part.into, length: part.length });
            }
            with
        };
        if let Some((to, from)) = self.disjoint(part.into.role, other.role) {
            kernel.reduce(
                &mut to[part.into.at..part.into.at + part.length],
                &from[other.at..other.at + part.length],
            );
        }
    }

    /// Returns two different memories, the first for writing. An element has one address in each memory, so no
    /// step moves elements within a memory.
    fn disjoint(&mut self, to: MemoryRole, from: MemoryRole) -> Option<(&mut [u8], &[u8])> {
        let memories = self.0.get_disjoint_mut([to as usize, from as usize]);
        debug_assert!(memories.is_ok(), "a step within {to:?}");
        let [to, from] = memories.ok()?;
        Some((to.bytes_mut(), from.bytes()))
    }
}

/// Called before each step, for tests of failures.
pub(crate) type StepWatch = Box<dyn FnMut(OperationStep) + Send>;

/// Why an operation can't go on.
#[derive(Debug)]
pub(super) enum Fault {
    Link(LinkError),
    Error(CollectiveError),
}

impl From<LinkError> for Fault {
    fn from(error: LinkError) -> Self {
        Self::Link(error)
    }
}

impl Fault {
    pub(super) fn into_error(self, at: OperationStep) -> CollectiveError {
        match self {
            Self::Error(error) => error,
            Self::Link(LinkError { rank, cause: LinkFault::Lost(reason) }) => {
                CollectiveError::rank_lost(rank, at, reason)
            }
            Self::Link(LinkError { rank, cause: LinkFault::Violation(what) }) => {
                CollectiveError::violation(rank, at, &what)
            }
        }
    }
}

/// The links that an earlier operation still needs, in one round of polls. Links keep the order of
/// operations.
#[derive(Debug, Default)]
pub(super) struct BusyLinks {
    pub(super) sends: Vec<bool>,
    pub(super) receives: Vec<bool>,
}

impl BusyLinks {
    pub(super) fn clear(&mut self) {
        self.sends.fill(false);
        self.receives.fill(false);
    }
}

/// What an operation needs from its engine to move on.
pub(super) struct Context<'a, L: RankLinks> {
    pub(super) links: &'a mut L,
    pub(super) busy: &'a mut BusyLinks,
    pub(super) ranks: usize,
    /// Where a short operation reduces.
    pub(super) sum: &'a mut Vec<u8>,
    pub(super) watch: Option<&'a mut StepWatch>,
}

impl<L: RankLinks> Context<'_, L> {
    /// Calls the watch before this step.
    pub(super) fn at(&mut self, tag: &Tag, step: u32, program: &Program) {
        if let Some(watch) = &mut self.watch {
            watch(OperationStep { operation: tag.operation, step, steps: program.steps.len() as u32 });
        }
    }
}

/// Checks a message of rank `from` against the one that is due.
pub(super) fn check(
    from: usize,
    due: &Tag,
    tag: &Tag,
    length: usize,
    arrived: usize,
    step: u32,
    steps: u32,
) -> Result<(), Fault> {
    if tag.operation == due.operation && tag.call == due.call && arrived == length {
        return Ok(());
    }
    let mismatch = |theirs: String| {
        let ours = Packed(due.call).to_string();
        Fault::Error(CollectiveError::mismatch(from, due.operation, &theirs, &ours))
    };
    Err(if tag.operation != due.operation {
        mismatch(format!("{} as operation {}", Packed(tag.call), tag.operation))
    } else if tag.call != due.call {
        mismatch(Packed(tag.call).to_string())
    } else {
        let what = format!("its message has {arrived} bytes, and one of {length} bytes was due");
        let at = OperationStep { operation: due.operation, step, steps };
        Fault::Error(CollectiveError::violation(from, at, &what))
    })
}
