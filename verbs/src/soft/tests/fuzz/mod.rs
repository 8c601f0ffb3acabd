//! A fuzzer. An input is a sequence of actions of a hostile process: what it writes to its end, and what it sends over the socket,
//! while this process uses its queue pair, and an honest connection of the same process goes on.
//!
//! After each input, memory that was not granted is unchanged, every completion belongs to a request, the honest connection has
//! carried messages with the right content, and descriptors and mappings are within a bound. A thread ends the process if an
//! input takes too long, and prints the input.

mod bytes;
mod hostile;
mod victim;

use std::io::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::thread;

use self::bytes::Bytes;
use self::hostile::Attacker;
use self::victim::Victim;
use super::*;
use crate::sync::lock;

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
            let ring = End::FIRST_OF_RING + value as usize % 256;
            let index = if step % 8 == 0 { End::FIRST_CHANGING + value as usize % 16 } else { ring };
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

/// The input that runs now.
static CURRENT: Mutex<Vec<u8>> = Mutex::new(Vec::new());
/// The number of inputs that have run.
static DONE: AtomicU64 = AtomicU64::new(0);

/// Ends the process if an input takes too long.
fn watch() {
    let mut last = (u64::MAX, Instant::now());
    loop {
        thread::sleep(Duration::from_millis(500));
        let done = DONE.load(Relaxed);
        if done != last.0 {
            last = (done, Instant::now());
        } else if last.1.elapsed() > 3 * PATIENCE {
            report("hangs");
            std::process::abort();
        }
    }
}

fn report(what: &str) {
    let input: String = lock(&CURRENT).iter().map(|byte| format!("{byte:02x}")).collect();
    let _ = writeln!(std::io::stderr(), "an input {what}: TONIC_RDMA_FUZZ_INPUT={input}");
}

/// Runs inputs made of `seed` for a time. Returns the numbers of inputs and of actions.
fn run_for(time: Duration, seed: u64) -> (u64, u64) {
    let start = Instant::now();
    let mut fuzzer = Fuzzer::new();
    let (mut inputs, mut actions) = (0, 0);
    // Inputs that had many actions begin others.
    let mut kept: Vec<Vec<u8>> = Vec::new();
    while start.elapsed() < time {
        let mut random = fastrand::Rng::with_seed(seed.wrapping_add(inputs));
        let mut input: Vec<u8> = match kept.len() {
            0..16 => Vec::new(),
            count => kept[random.usize(..count)].clone(),
        };
        input.truncate(random.usize(..=input.len()));
        for _ in 0..random.usize(..4) {
            if let Some(byte) = (!input.is_empty()).then(|| random.usize(..input.len())) {
                input[byte] = random.u8(..);
            }
        }
        let fresh = random.usize(16..200);
        input.extend((0..fresh).map(|_| random.u8(..)));
        *lock(&CURRENT) = input.clone();
        let race = random.u8(..8) == 0;
        actions += fuzzer.run(&input, race);
        inputs += 1;
        DONE.fetch_add(1, Relaxed);
        if kept.len() < 64 {
            kept.push(input);
        } else {
            let place = random.usize(..64);
            kept[place] = input;
        }
    }
    (inputs, actions)
}

/// Prints the input, if a test fails.
struct Report;

impl Drop for Report {
    fn drop(&mut self) {
        if thread::panicking() {
            report("fails");
        }
    }
}

/// Runs the fuzzer for some seconds (`TONIC_RDMA_FUZZ_SECONDS`), from a seed (`TONIC_RDMA_FUZZ_SEED`), or runs one input
/// (`TONIC_RDMA_FUZZ_INPUT`).
#[test]
#[expect(clippy::print_stdout, reason = "a figure for the book")]
fn what_a_hostile_process_does_harms_no_other() {
    let number = |name, default| std::env::var(name).map_or(default, |text| text.parse().unwrap());
    let _report = Report;
    thread::spawn(watch);
    if let Ok(hex) = std::env::var("TONIC_RDMA_FUZZ_INPUT") {
        let digits = hex.as_bytes().chunks_exact(2);
        let input: Vec<u8> =
            digits.map(|two| u8::from_str_radix(std::str::from_utf8(two).unwrap(), 16).unwrap()).collect();
        *lock(&CURRENT) = input.clone();
        Fuzzer::new().run(&input, false);
        return;
    }
    let seconds = number("TONIC_RDMA_FUZZ_SECONDS", 4);
    let seed = number("TONIC_RDMA_FUZZ_SEED", 1);
    let (inputs, actions) = run_for(Duration::from_secs(seconds), seed << 32);
    println!("fuzzer: {inputs} inputs with {actions} actions in {seconds} s, seed {seed}");
    assert!(inputs > 0);
}
