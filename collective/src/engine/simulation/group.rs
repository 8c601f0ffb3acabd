//! Ranks that run engines over simulated lanes.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tonic_rdma_tensor::Dtype;

use super::world::{SimulatedLanes, SimulatedMemory, World};
use crate::engine::under::Course;
use crate::engine::{Call, Engine, Holding, Kind, Lent, OperationId, Request, ShortResult};
use crate::error::CollectiveError;
use crate::plan::{Collective, part};

/// How an operation gets its elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hands {
    Buffer,
    BufferPair,
    Slice,
    SlicePair,
}

/// One operation of one rank.
#[derive(Clone, Debug)]
pub(super) struct Task {
    pub(super) call: Call,
    pub(super) hands: Hands,
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

struct Running {
    task: usize,
    id: OperationId,
    /// Input and output of a borrowed operation.
    slices: Option<(Option<Vec<u8>>, Vec<u8>)>,
}

pub(super) struct Rank {
    pub(super) rank: usize,
    pub(super) engine: Engine<SimulatedLanes>,
    pub(super) tasks: Vec<Task>,
    pub(super) outcomes: Vec<Option<Outcome>>,
    running: Vec<Running>,
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
        let lanes = SimulatedLanes { rank, world: Rc::clone(world), inline };
        let supplied = Arc::clone(numbers);
        let supply = move |bytes: usize| {
            let number = supplied.fetch_add(1, Ordering::Relaxed);
            Ok(SimulatedMemory { number, bytes: vec![0xA5; bytes + 3] })
        };
        Self {
            rank,
            engine: Engine::new(rank, ranks, lanes, Box::new(supply)),
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

    /// Does one random thing: starts an operation, looks at the lanes, or takes a result.
    pub(super) fn act(&mut self) {
        let choice = self.world.borrow_mut().random.u8(0..4);
        match choice {
            0 if self.next < self.tasks.len() && self.running.len() < 80 => self.begin(),
            1 if self.running.iter().any(|running| self.engine.is_finished(running.id)) => self.collect(),
            _ => self.look(),
        }
        self.show();
    }

    fn begin(&mut self) {
        let index = self.next;
        self.next += 1;
        let task = self.tasks[index].clone();
        let (request, own, out) = self.request(&task);
        let size = task.call.dtype.size().unwrap();
        let length = (request.out.1 - request.out.0) * size;
        assert_eq!(out.len(), length);
        let mut out = out;
        if task.short
            && let Some(result) = self.engine.short(&request, own.as_deref(), &mut out, 3)
        {
            match result {
                ShortResult::Done => {
                    let out = self.result(&task.call, request.out, out);
                    self.outcomes[index] = Some(Outcome { result: Ok(()), out });
                }
                ShortResult::UnderWay(id) => {
                    let slices = match task.hands {
                        Hands::Buffer | Hands::BufferPair => {
                            let holding = self.own(own, out);
                            self.engine.adopt(id, holding);
                            None
                        }
                        _ => Some((own, out)),
                    };
                    self.running.push(Running { task: index, id, slices });
                }
            }
            return;
        }
        let (holding, slices) = match task.hands {
            Hands::Buffer | Hands::BufferPair => (self.own(own, out), None),
            _ => (Holding::Borrowed, Some((own, out))),
        };
        match self.engine.start(&request, holding) {
            Ok(id) => self.running.push(Running { task: index, id, slices }),
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
        let out_of_place = matches!(task.hands, Hands::BufferPair | Hands::SlicePair);
        let request = |input, out| Request { call, input, out, limit: self.limit };
        if out_of_place {
            let out = vec![0x5A; (result.1 - result.0) * size];
            return (request(Some(input), result), Some(task.elements.clone()), out);
        }
        let mut out = vec![0x5A; call.elements * size];
        out[input.0 * size..input.1 * size].copy_from_slice(&task.elements);
        (request(None, whole), None, out)
    }

    fn own(&self, input: Option<Vec<u8>>, out: Vec<u8>) -> Holding<SimulatedMemory> {
        let memory = |mut bytes: Vec<u8>| {
            bytes.extend([0xB6; 5]);
            SimulatedMemory { number: self.numbers.fetch_add(1, Ordering::Relaxed), bytes }
        };
        Holding::Owned { input: input.map(memory), out: Some(memory(out)) }
    }

    fn look(&mut self) {
        let (lent, now) = {
            let mut world = self.world.borrow_mut();
            let lent = (!self.running.is_empty()).then(|| world.random.usize(0..self.running.len()));
            let now = world.random.bool().then(|| self.start + Duration::from_micros(world.now));
            (lent, now)
        };
        let lent = lent.and_then(|at| {
            let running = &mut self.running[at];
            let (input, out) = running.slices.as_mut()?;
            Some((running.id, Lent { input: input.as_deref(), out }))
        });
        self.engine.progress(now, lent);
    }

    /// Takes the result of an operation that has ended, in any order.
    fn collect(&mut self) {
        let ended: Vec<usize> =
            (0..self.running.len()).filter(|at| self.engine.is_finished(self.running[*at].id)).collect();
        let at = *self.world.borrow_mut().random.choice(&ended).unwrap();
        let running = self.running.swap_remove(at);
        let (result, holding) = self.engine.take(running.id).unwrap();
        let task = self.tasks[running.task].clone();
        let (request, own, _) = self.request(&task);
        let size = task.call.dtype.size().unwrap();
        let out = match (holding, running.slices) {
            (Holding::Owned { input, out }, None) => {
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
            (Holding::Borrowed, Some((input, out))) => {
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
        for under in &self.engine.under {
            if let Holding::Owned { input, out } = &under.holding {
                show(input);
                show(out);
            }
            if let Course::Planned(planned) = &under.course {
                show(&planned.staging);
                show(&planned.scratch);
            }
        }
        for finished in &self.engine.finished {
            if let Holding::Owned { input, out } = &finished.holding {
                show(input);
                show(out);
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
