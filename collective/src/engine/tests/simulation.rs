//! Ranks that run engines over simulated links: queues with bounded room and random delays, in virtual time.
//!
//! A reference is read chunk by chunk, from what the sender's memory holds at that moment. The link compares
//! each chunk with what the memory held when the reference was sent, so memory that changes too early fails
//! the test.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::ops::{Deref, DerefMut};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::engine::in_flight::Execution;
use crate::engine::{Call, CallerMemory, Engine, Kind, LentSlices, OperationId, Request, ShortResult};
use crate::error::CollectiveError;
use crate::link::{LinkError, LinkFault, RankLinks, Tag};
use crate::plan::{Collective, part};
use tonic_rdma_tensor::Dtype;

/// The links between all ranks.
pub(super) struct World {
    pub(super) random: fastrand::Rng,
    /// Virtual microseconds.
    pub(super) now: u64,
    links: Vec<Vec<Link>>,
    /// When each rank learns that a rank has died.
    known_dead: Vec<Option<Vec<u64>>>,
    /// What each memory holds, as peers see it.
    pub(super) mirrors: HashMap<u64, Vec<u8>>,
    slots: usize,
    delay: u64,
}

#[derive(Default)]
struct Link {
    messages: VecDeque<Message>,
    sent: u64,
    taken: u64,
    /// The taken counts, and when the sender sees them.
    shown: VecDeque<(u64, u64)>,
    seen: u64,
    last_arrival: u64,
    /// How much of the first message was given.
    given: usize,
}

struct Message {
    tag: Tag,
    arrival: u64,
    memory: Option<(u64, usize)>,
    content: Vec<u8>,
}

/// Memory that peers read from.
#[derive(Debug)]
pub(super) struct SimulatedMemory {
    pub(super) number: u64,
    pub(super) bytes: Vec<u8>,
}

impl Deref for SimulatedMemory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl DerefMut for SimulatedMemory {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

pub(super) struct SimulatedLinks {
    pub(super) rank: usize,
    pub(super) world: Rc<RefCell<World>>,
    pub(super) inline: usize,
    /// Whether a receive has given bytes since the last call of `has_delivered`.
    pub(super) given: bool,
}

impl Engine<SimulatedLinks> {
    /// Returns whether an operation has ended, so that `take` gives its result.
    fn is_finished(&self, id: OperationId) -> bool {
        self.finished.iter().any(|(finished, _)| *finished == id)
    }
}

impl World {
    pub(super) fn new(ranks: usize, mut random: fastrand::Rng) -> Self {
        Self {
            now: 0,
            links: (0..ranks).map(|_| (0..ranks).map(|_| Link::default()).collect()).collect(),
            known_dead: vec![None; ranks],
            mirrors: HashMap::new(),
            slots: random.usize(1..9),
            delay: *random.choice(&[1, 10, 200]).unwrap(),
            random,
        }
    }

    /// Returns how many bytes were given of the first message of each link to `rank`.
    pub(super) fn given(&self, rank: usize) -> Vec<usize> {
        self.links.iter().map(|links| links[rank].given).collect()
    }

    /// Ends a rank. All others learn of it within a random time.
    pub(super) fn kill(&mut self, rank: usize) {
        let (now, ranks) = (self.now, self.links.len());
        self.known_dead[rank] = Some((0..ranks).map(|_| now + self.random.u64(0..1000)).collect());
    }

    fn check(&self, from: usize, to: usize) -> Result<(), LinkError> {
        let known = self.known_dead[to].as_ref().is_some_and(|times| times[from] <= self.now);
        if known {
            return Err(LinkError { rank: to, cause: LinkFault::Lost("killed by the test".into()) });
        }
        Ok(())
    }

    fn has_room(&mut self, from: usize, to: usize) -> Result<bool, LinkError> {
        self.check(from, to)?;
        self.seen(from, to);
        let link = &self.links[from][to];
        Ok(((link.sent - link.seen) as usize) < self.slots)
    }

    fn seen(&mut self, from: usize, to: usize) -> u64 {
        let link = &mut self.links[from][to];
        while link.shown.front().is_some_and(|(time, _)| *time <= self.now) {
            link.seen = link.shown.pop_front().unwrap().1;
        }
        link.seen
    }

    fn push(
        &mut self,
        from: usize,
        to: usize,
        tag: Tag,
        memory: Option<(u64, usize)>,
        content: Vec<u8>,
    ) -> u64 {
        let delay = self.random.u64(0..=self.delay);
        let link = &mut self.links[from][to];
        let arrival = link.last_arrival.max(self.now + delay);
        link.last_arrival = arrival;
        link.messages.push_back(Message { tag, arrival, memory, content });
        link.sent += 1;
        link.sent - 1
    }
}

impl RankLinks for SimulatedLinks {
    type Memory = SimulatedMemory;

    fn has_delivered(&mut self) -> bool {
        std::mem::take(&mut self.given)
    }

    fn offers(&self, _: &SimulatedMemory) -> bool {
        true
    }

    fn inline(&self) -> usize {
        self.inline
    }

    fn send(&mut self, to: usize, tag: Tag, payload: &[u8]) -> Result<bool, LinkError> {
        let mut world = self.world.borrow_mut();
        assert!(payload.len() <= self.inline);
        if !world.has_room(self.rank, to)? {
            return Ok(false);
        }
        world.push(self.rank, to, tag, None, payload.to_vec());
        Ok(true)
    }

    fn send_reference(
        &mut self,
        to: usize,
        tag: Tag,
        memory: &SimulatedMemory,
        offset: usize,
        length: usize,
    ) -> Result<Option<u64>, LinkError> {
        let mut world = self.world.borrow_mut();
        if !world.has_room(self.rank, to)? {
            return Ok(None);
        }
        let content = memory[offset..offset + length].to_vec();
        Ok(Some(world.push(self.rank, to, tag, Some((memory.number, offset)), content)))
    }

    fn taken(&mut self, to: usize) -> Result<u64, LinkError> {
        let mut world = self.world.borrow_mut();
        world.check(self.rank, to)?;
        Ok(world.seen(self.rank, to))
    }

    fn peek(&mut self, from: usize) -> Result<Option<(Tag, usize)>, LinkError> {
        let world = self.world.borrow();
        let next =
            world.links[from][self.rank].messages.front().filter(|message| message.arrival <= world.now);
        match next {
            // A message that has arrived can be taken also after the sender's end.
            Some(message) => Ok(Some((message.tag, message.content.len()))),
            None => world.check(self.rank, from).map(|()| None),
        }
    }

    fn receive(&mut self, from: usize, then: &mut dyn FnMut(usize, &[u8])) -> Result<bool, LinkError> {
        let mut world = self.world.borrow_mut();
        let world = &mut *world;
        let link = &mut world.links[from][self.rank];
        let message = link.messages.front().expect("peek showed a message");
        let given = link.given;
        let remaining = message.content.len() - given;
        if let Some((number, offset)) = message.memory {
            if let Some(times) = &world.known_dead[from]
                && times[self.rank] <= world.now
            {
                return Err(world.check(self.rank, from).unwrap_err());
            }
            if world.random.u8(0..4) == 0 {
                return Ok(false);
            }
            let count = remaining.min(64 * world.random.usize(1..5));
            let range = offset + given..offset + given + count;
            let now = &world.mirrors[&number][range];
            assert_eq!(
                now,
                &message.content[given..given + count],
                "rank {from} changed memory {number}, which rank {} reads for {:?}",
                self.rank,
                message.tag
            );
            then(given, now);
            link.given += count;
            self.given = true;
            if count < remaining {
                return Ok(false);
            }
        } else {
            let cut = if remaining > 64 { 64 } else { remaining };
            then(0, &message.content[..cut]);
            if cut < remaining {
                then(cut, &message.content[cut..]);
            }
        }
        link.given = 0;
        link.messages.pop_front();
        link.taken += 1;
        let time = world.now + world.random.u64(0..=world.delay);
        let time = link.shown.back().map_or(time, |(last, _)| time.max(*last));
        link.shown.push_back((time, link.taken));
        Ok(true)
    }

    fn receive_into(&mut self, from: usize, into: &mut [u8]) -> Result<bool, LinkError> {
        self.receive(from, &mut |offset, chunk| into[offset..offset + chunk.len()].copy_from_slice(chunk))
    }

    fn progress(&mut self) -> Result<(), LinkError> {
        let world = self.world.borrow();
        // The watch of a rank finds the end of a peer's process.
        (0..world.links.len()).try_for_each(|rank| world.check(self.rank, rank))
    }
}

/// The kind of operand that the caller gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OperandKind {
    Buffer,
    BufferPair,
    Slice,
    SlicePair,
}

/// One operation of one rank.
#[derive(Clone, Debug)]
pub(super) struct Task {
    pub(super) call: Call,
    pub(super) operand: OperandKind,
    /// The elements of this rank: as many as its input has.
    pub(super) elements: Vec<u8>,
    /// Whether the caller tries the short path.
    pub(super) short: bool,
}

/// What became of a task.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) result: Result<(), CollectiveError>,
    /// The bytes of the result's range.
    pub(super) out: Vec<u8>,
}

struct RunningTask {
    task: usize,
    id: OperationId,
    /// Input and output of a borrowed operation.
    slices: Option<(Option<Vec<u8>>, Vec<u8>)>,
}

pub(super) struct Rank {
    pub(super) rank: usize,
    pub(super) engine: Engine<SimulatedLinks>,
    pub(super) tasks: Vec<Task>,
    pub(super) outcomes: Vec<Option<Outcome>>,
    running: Vec<RunningTask>,
    /// Memory that came back to the caller, who has changed it.
    back: Vec<SimulatedMemory>,
    next: usize,
    pub(super) limit: Duration,
    world: Rc<RefCell<World>>,
    numbers: Arc<AtomicU64>,
    start: Instant,
}

impl Rank {
    pub(super) fn new(
        rank: usize,
        ranks: usize,
        world: &Rc<RefCell<World>>,
        numbers: &Arc<AtomicU64>,
        inline: usize,
        tasks: Vec<Task>,
    ) -> Self {
        let links = SimulatedLinks { rank, world: Rc::clone(world), inline, given: false };
        let supplied = Arc::clone(numbers);
        let supply = move |bytes: usize| {
            let number = supplied.fetch_add(1, Ordering::Relaxed);
            Ok(SimulatedMemory { number, bytes: vec![0xA5; bytes + 3] })
        };
        Self {
            rank,
            engine: Engine::new(rank, ranks, links, Box::new(supply)),
            outcomes: tasks.iter().map(|_| None).collect(),
            tasks,
            running: Vec::new(),
            back: Vec::new(),
            next: 0,
            limit: Duration::from_secs(3600),
            world: Rc::clone(world),
            numbers: Arc::clone(numbers),
            start: Instant::now(),
        }
    }

    pub(super) fn is_done(&self) -> bool {
        self.outcomes.iter().all(Option::is_some)
    }

    pub(super) fn running(&self) -> usize {
        self.running.len()
    }

    /// Does one random thing: starts an operation, polls the links, or takes a result.
    pub(super) fn act(&mut self) {
        let choice = self.world.borrow_mut().random.u8(0..4);
        match choice {
            0 if self.next < self.tasks.len() && self.running.len() < 80 => self.begin(),
            1 if self.running.iter().any(|running| self.engine.is_finished(running.id)) => self.collect(),
            _ => self.poll(),
        }
        self.show();
    }

    fn begin(&mut self) {
        let index = self.next;
        self.next += 1;
        let task = self.tasks[index].clone();
        let (request, own, mut out) = self.request(&task);
        assert_eq!(out.len(), (request.out.1 - request.out.0) * task.call.dtype.size().unwrap());
        let mut polls = 0..3;
        if task.short
            && let Some(result) =
                self.engine.short(&request, own.as_deref(), &mut out, || polls.next().is_some())
        {
            match result {
                ShortResult::Done => {
                    let out = self.result(&task.call, request.out, out);
                    self.outcomes[index] = Some(Outcome { result: Ok(()), out });
                }
                ShortResult::UnderWay(id) => {
                    let slices = match task.operand {
                        OperandKind::Buffer | OperandKind::BufferPair => {
                            let memory = self.own(own, out);
                            self.engine.adopt(id, memory);
                            None
                        }
                        _ => Some((own, out)),
                    };
                    self.running.push(RunningTask { task: index, id, slices });
                }
            }
            return;
        }
        let (memory, slices) = match task.operand {
            OperandKind::Buffer | OperandKind::BufferPair => (self.own(own, out), None),
            _ => (CallerMemory::Borrowed, Some((own, out))),
        };
        match self.engine.start(&request, memory) {
            Ok(id) => self.running.push(RunningTask { task: index, id, slices }),
            Err((error, _)) => {
                self.outcomes[index] = Some(Outcome { result: Err(error), out: Vec::new() });
            }
        }
    }

    /// Returns the request of a task, its input if it is out of place, and its output.
    fn request(&self, task: &Task) -> (Request, Option<Vec<u8>>, Vec<u8>) {
        let call = task.call;
        let size = call.dtype.size().unwrap();
        let whole = (0, call.elements);
        let ranks = self.engine.ranks;
        let own = part(call.elements, ranks, self.rank);
        let own = (own.start, own.end);
        let collective = match call.kind {
            Kind::Group(collective) => collective,
            Kind::Send { .. } | Kind::Receive { .. } => Collective::AllReduce,
        };
        let input = if collective == Collective::AllGather { own } else { whole };
        let result = if collective == Collective::ReduceScatter { own } else { whole };
        let out_of_place = matches!(task.operand, OperandKind::BufferPair | OperandKind::SlicePair);
        let request = |input, out| Request { call, input, out, limit: self.limit };
        if out_of_place {
            let out = vec![0x5A; (result.1 - result.0) * size];
            return (request(Some(input), result), Some(task.elements.clone()), out);
        }
        let mut out = vec![0x5A; call.elements * size];
        out[input.0 * size..input.1 * size].copy_from_slice(&task.elements);
        (request(None, whole), None, out)
    }

    fn own(&self, input: Option<Vec<u8>>, out: Vec<u8>) -> CallerMemory<SimulatedMemory> {
        let memory = |mut bytes: Vec<u8>| {
            bytes.extend([0xB6; 5]);
            SimulatedMemory { number: self.numbers.fetch_add(1, Ordering::Relaxed), bytes }
        };
        CallerMemory::Owned { input: input.map(memory), out: Some(memory(out)) }
    }

    fn poll(&mut self) {
        let (lent, now) = {
            let mut world = self.world.borrow_mut();
            let lent = (!self.running.is_empty()).then(|| world.random.usize(0..self.running.len()));
            let now = world.random.bool().then(|| self.start + Duration::from_micros(world.now));
            (lent, now)
        };
        let lent = lent.and_then(|at| {
            let running = &mut self.running[at];
            let (input, out) = running.slices.as_mut()?;
            Some((running.id, LentSlices { input: input.as_deref(), out }))
        });
        let before = self.world.borrow().given(self.rank);
        let moved = self.engine.progress(now, lent);
        let same = before == self.world.borrow().given(self.rank);
        assert!(moved || same, "a part of a message was received, and the caller would nap");
    }

    /// Takes the result of an operation that has ended, in any order.
    fn collect(&mut self) {
        let ended: Vec<usize> =
            (0..self.running.len()).filter(|at| self.engine.is_finished(self.running[*at].id)).collect();
        let at = *self.world.borrow_mut().random.choice(&ended).unwrap();
        let running = self.running.swap_remove(at);
        let (result, memory) = self.engine.take(running.id).unwrap();
        let task = self.tasks[running.task].clone();
        let (request, own, _) = self.request(&task);
        let size = task.call.dtype.size().unwrap();
        let out = match (memory, running.slices) {
            (CallerMemory::Owned { input, out }, None) => {
                let (mut input, mut out) = (input, out.unwrap());
                if let (Some(input), Some(own)) = (&mut input, &own) {
                    assert_eq!(input[..own.len()], own[..], "the input has changed");
                    input.bytes.fill(0xEE);
                }
                let length = (request.out.1 - request.out.0) * size;
                assert!(out.len() >= length);
                let bytes = out[..length].to_vec();
                // The caller uses its memory again.
                out.bytes.fill(0xEE);
                self.back.extend(input.into_iter().chain([out]));
                bytes
            }
            (CallerMemory::Borrowed, Some((input, out))) => {
                assert_eq!(input, own, "the input has changed");
                out
            }
            other => panic!("memory of another kind came back: {other:?}"),
        };
        let out = self.result(&task.call, request.out, out);
        self.outcomes[running.task] = Some(Outcome { result, out });
    }

    /// Returns the bytes of the result.
    fn result(&self, call: &Call, window: (usize, usize), out: Vec<u8>) -> Vec<u8> {
        if call.kind == Kind::Group(Collective::ReduceScatter) {
            let size = call.dtype.size().unwrap();
            let part = part(call.elements, self.engine.ranks, self.rank);
            return out[(part.start - window.0) * size..(part.end - window.0) * size].to_vec();
        }
        out
    }

    /// Shows the peers what the memory of this rank holds.
    fn show(&mut self) {
        let mut world = self.world.borrow_mut();
        let mut show = |memory: &Option<SimulatedMemory>| {
            if let Some(memory) = memory {
                world.mirrors.entry(memory.number).or_default().clone_from(&memory.bytes);
            }
        };
        let operation = self.engine.in_flight.iter().map(|operation| &operation.memory);
        for memory in operation.chain(self.engine.finished.iter().map(|(_, ended)| &ended.1)) {
            if let CallerMemory::Owned { input, out } = memory {
                show(input);
                show(out);
            }
        }
        for operation in &self.engine.in_flight {
            if let Execution::Planned(planned) = &operation.execution {
                show(&planned.staging);
                show(&planned.scratch);
            }
        }
        for memory in self.back.drain(..) {
            show(&Some(memory));
        }
        for memory in &self.engine.kept {
            world.mirrors.insert(memory.number, memory.bytes.clone());
        }
    }
}

/// Returns the bytes of `dtype` elements that are small whole numbers, so that sums are exact in every order.
pub(super) fn whole_numbers(dtype: Dtype, count: usize, random: &mut fastrand::Rng) -> Vec<u8> {
    (0..count)
        .flat_map(|_| {
            let value = random.i8(-8..9);
            match dtype {
                Dtype::F32 => f32::from(value).to_ne_bytes().to_vec(),
                Dtype::F64 => f64::from(value).to_ne_bytes().to_vec(),
                Dtype::F16 => half::f16::from(value).to_ne_bytes().to_vec(),
                Dtype::I32 => i32::from(value).to_ne_bytes().to_vec(),
                Dtype::U8 => vec![value as u8],
                other => panic!("no numbers of type {other:?}"),
            }
        })
        .collect()
}
