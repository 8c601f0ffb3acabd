//! Simulated lanes: queues with bounded room and random delays, in virtual time.
//!
//! A reference is pulled piece by piece, from what the sender's memory holds at that moment. The lane compares each piece with what
//! the memory held when the reference was sent, so memory that changes too early fails the test.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::ops::{Deref, DerefMut};
use std::rc::Rc;

use tonic_rdma_tensor::ChannelError;

use crate::lane::{LaneError, LaneFault, Lanes, Tag};

/// The lanes between all ranks.
pub(super) struct World {
    pub(super) random: fastrand::Rng,
    /// Virtual microseconds.
    pub(super) now: u64,
    lanes: Vec<Vec<Lane>>,
    /// When each rank learns that a rank has died.
    known_dead: Vec<Option<Vec<u64>>>,
    /// What each memory holds, as peers see it.
    pub(super) mirrors: HashMap<u64, Vec<u8>>,
    slots: usize,
    delay: u64,
}

#[derive(Default)]
struct Lane {
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

/// Memory that peers pull from.
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

pub(super) struct SimulatedLanes {
    pub(super) rank: usize,
    pub(super) world: Rc<RefCell<World>>,
    pub(super) inline: usize,
    /// Whether a receive has given bytes since the last call of `has_given`.
    pub(super) given: bool,
}

impl World {
    pub(super) fn new(ranks: usize, mut random: fastrand::Rng) -> Self {
        Self {
            now: 0,
            lanes: (0..ranks).map(|_| (0..ranks).map(|_| Lane::default()).collect()).collect(),
            known_dead: vec![None; ranks],
            mirrors: HashMap::new(),
            slots: random.usize(1..9),
            delay: *random.choice(&[1, 10, 200]).unwrap(),
            random,
        }
    }

    /// Returns how many bytes were given of the first message of each lane to `rank`.
    pub(super) fn given(&self, rank: usize) -> Vec<usize> {
        self.lanes.iter().map(|lanes| lanes[rank].given).collect()
    }

    /// Ends a rank. All others learn of it within a random time.
    pub(super) fn kill(&mut self, rank: usize) {
        let (now, ranks) = (self.now, self.lanes.len());
        self.known_dead[rank] = Some((0..ranks).map(|_| now + self.random.u64(0..1000)).collect());
    }

    fn check(&self, from: usize, to: usize) -> Result<(), LaneError> {
        let known = self.known_dead[to].as_ref().is_some_and(|times| times[from] <= self.now);
        if known {
            let cause = ChannelError::PeerLost {
                peer: format!("rank {to}").into(),
                reason: "killed by the test".into(),
            };
            return Err(LaneError { rank: to, cause: LaneFault::Lost(cause) });
        }
        Ok(())
    }

    fn has_room(&mut self, from: usize, to: usize) -> Result<bool, LaneError> {
        self.check(from, to)?;
        self.seen(from, to);
        let lane = &self.lanes[from][to];
        Ok(((lane.sent - lane.seen) as usize) < self.slots)
    }

    fn seen(&mut self, from: usize, to: usize) -> u64 {
        let lane = &mut self.lanes[from][to];
        while lane.shown.front().is_some_and(|(time, _)| *time <= self.now) {
            lane.seen = lane.shown.pop_front().unwrap().1;
        }
        lane.seen
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
        let lane = &mut self.lanes[from][to];
        let arrival = lane.last_arrival.max(self.now + delay);
        lane.last_arrival = arrival;
        lane.messages.push_back(Message { tag, arrival, memory, content });
        lane.sent += 1;
        lane.sent - 1
    }
}

impl Lanes for SimulatedLanes {
    type Memory = SimulatedMemory;

    fn has_given(&mut self) -> bool {
        std::mem::take(&mut self.given)
    }

    fn offers(&self, _: &SimulatedMemory) -> bool {
        true
    }

    fn inline(&self) -> usize {
        self.inline
    }

    fn send(&mut self, to: usize, tag: Tag, payload: &[u8]) -> Result<bool, LaneError> {
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
    ) -> Result<Option<u64>, LaneError> {
        let mut world = self.world.borrow_mut();
        if !world.has_room(self.rank, to)? {
            return Ok(None);
        }
        let content = memory[offset..offset + length].to_vec();
        Ok(Some(world.push(self.rank, to, tag, Some((memory.number, offset)), content)))
    }

    fn taken(&mut self, to: usize) -> Result<u64, LaneError> {
        let mut world = self.world.borrow_mut();
        world.check(self.rank, to)?;
        Ok(world.seen(self.rank, to))
    }

    fn peek(&mut self, from: usize) -> Result<Option<(Tag, usize)>, LaneError> {
        let world = self.world.borrow();
        let next =
            world.lanes[from][self.rank].messages.front().filter(|message| message.arrival <= world.now);
        match next {
            // A message that has arrived can be taken also after the sender's end.
            Some(message) => Ok(Some((message.tag, message.content.len()))),
            None => world.check(self.rank, from).map(|()| None),
        }
    }

    fn receive(&mut self, from: usize, then: &mut dyn FnMut(usize, &[u8])) -> Result<bool, LaneError> {
        let mut world = self.world.borrow_mut();
        let world = &mut *world;
        let lane = &mut world.lanes[from][self.rank];
        let message = lane.messages.front().expect("peek showed a message");
        let given = lane.given;
        let left = message.content.len() - given;
        if let Some((number, offset)) = message.memory {
            if let Some(times) = &world.known_dead[from]
                && times[self.rank] <= world.now
            {
                return Err(world.check(self.rank, from).unwrap_err());
            }
            if world.random.u8(0..4) == 0 {
                return Ok(false);
            }
            let count = left.min(64 * world.random.usize(1..5));
            let range = offset + given..offset + given + count;
            let now = &world.mirrors[&number][range];
            assert_eq!(
                now,
                &message.content[given..given + count],
                "rank {from} changed memory {number}, which rank {} pulls for {:?}",
                self.rank,
                message.tag
            );
            then(given, now);
            lane.given += count;
            self.given = true;
            if count < left {
                return Ok(false);
            }
        } else {
            let cut = if left > 64 { 64 } else { left };
            then(0, &message.content[..cut]);
            if cut < left {
                then(cut, &message.content[cut..]);
            }
        }
        lane.given = 0;
        lane.messages.pop_front();
        lane.taken += 1;
        let time = world.now + world.random.u64(0..=world.delay);
        let time = lane.shown.back().map_or(time, |(last, _)| time.max(*last));
        lane.shown.push_back((time, lane.taken));
        Ok(true)
    }

    fn receive_into(&mut self, from: usize, into: &mut [u8]) -> Result<bool, LaneError> {
        self.receive(from, &mut |offset, piece| into[offset..offset + piece.len()].copy_from_slice(piece))
    }

    fn progress(&mut self) -> Result<(), LaneError> {
        let world = self.world.borrow();
        // The watch of a rank finds the end of a peer's process.
        (0..world.lanes.len()).try_for_each(|rank| world.check(self.rank, rank))
    }
}
