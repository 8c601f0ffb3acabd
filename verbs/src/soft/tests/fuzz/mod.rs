//! A fuzzer. An input is a sequence of actions of a hostile process: what it writes to its end, and what it
//! sends over the socket, while this process uses its queue pair, and an honest connection of the same
//! process continues.
//!
//! After each input, memory that was not granted is unchanged, every completion belongs to a request, the
//! honest connection has carried messages with the right content. Every 64 inputs, descriptors and mappings
//! are within a bound. A thread ends the process if an input takes too long, and prints the input.

mod bytes;
#[cfg(test)]
mod driver;
mod hostile;
mod victim;

use std::sync::atomic::AtomicBool;
use std::thread;

use self::bytes::Bytes;
use self::hostile::Attacker;
use self::victim::Victim;
use super::*;

/// Descriptors and mappings that a process with one hostile peer may have beside those that it has without.
const BOUND: usize = 400;
/// Most actions of one input.
const ACTIONS: usize = 64;

/// The state that inputs share.
struct Fuzzer {
    honest: Honest,
    victim: Victim,
    inputs: u64,
    descriptors: usize,
    mappings: usize,
}

impl Fuzzer {
    fn new() -> Self {
        let (mut honest, victim) = (Honest::connected(), Victim::new());
        honest.exchange();
        Self { honest, victim, inputs: 0, descriptors: descriptors(), mappings: mappings() }
    }

    /// Runs one input. Returns the number of actions.
    fn run(&mut self, input: &[u8], race: bool) -> u64 {
        let mut bytes = Bytes(input);
        let mut actions = 0;
        let victim = self.victim.connect();
        let mut attacker = Attacker::new(&victim);
        let stop = AtomicBool::new(false);
        let core = attacker.core();
        let seed = bytes.number();
        thread::scope(|scope| {
            let _stop = Stop(&stop);
            if race {
                scope.spawn(|| scribble_until(&core, seed, &stop));
            }
            while !bytes.is_empty() && actions < ACTIONS {
                actions += 1;
                match bytes.below(16) {
                    0..10 => attacker.act(&mut bytes, &self.victim, &victim),
                    10 => self.honest.exchange(),
                    _ => self.victim.act(&mut bytes, &victim),
                }
            }
        });
        self.victim.poll(&victim);
        self.victim.check();
        self.honest.exchange();
        drop((attacker, victim));
        self.inputs += 1;
        if self.inputs.is_multiple_of(64) {
            self.check_resources();
        }
        actions as u64
    }

    fn check_resources(&self) {
        crate::soft::closer::wait_until_free();
        let (descriptors, mappings) = (descriptors(), mappings());
        assert!(descriptors < self.descriptors + BOUND, "{descriptors} descriptors");
        assert!(mappings < self.mappings + BOUND, "{mappings} mappings, of {} before", self.mappings);
    }
}

/// Stops the other thread, also if this thread panics.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Changes words of the end of a hostile process, while this process reads them.
fn scribble_until(core: &Core, seed: u64, stop: &AtomicBool) {
    let words = core.end.words();
    for round in 0.. {
        let values = random(seed.wrapping_add(round));
        for step in 0..64 {
            let value = values(step);
            let ring = PairEnd::FIRST_OF_RING + value as usize % 256;
            let index = if step % 8 == 0 { PairEnd::FIRST_CHANGING + value as usize % 16 } else { ring };
            words[index].store(values(step + 64), Relaxed);
        }
        if stop.load(Relaxed) {
            break;
        }
        thread::yield_now();
    }
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}

fn mappings() -> usize {
    std::fs::read_to_string("/proc/self/maps").map_or(0, |maps| maps.lines().count())
}

/// Runs one input, as libFuzzer's target does. The state stays from input to input.
#[cfg(fuzzing)]
pub fn run_input(input: &[u8]) {
    thread_local!(static FUZZER: std::cell::RefCell<Option<Fuzzer>> = const { std::cell::RefCell::new(None) });
    FUZZER.with_borrow_mut(|fuzzer| fuzzer.get_or_insert_with(Fuzzer::new).run(input, false));
}
