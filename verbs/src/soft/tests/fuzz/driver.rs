//! Makes inputs without measuring their coverage, and runs them.

use std::io::Write;
use std::sync::Mutex;
use std::sync::atomic::AtomicU64;

use super::*;
use crate::panics::lock;

/// The input that runs now.
static CURRENT: Mutex<Vec<u8>> = Mutex::new(Vec::new());
/// The number of inputs that have run.
static DONE: AtomicU64 = AtomicU64::new(0);

/// Ends the process if an input takes too long.
#[allow(clippy::disallowed_methods, reason = "the thread that hangs can't report it")]
fn watch() {
    let mut last = (u64::MAX, Instant::now());
    loop {
        thread::sleep(Duration::from_millis(500));
        let done = DONE.load(Relaxed);
        if done != last.0 {
            last = (done, Instant::now());
        } else if last.1.elapsed() > 3 * TIMEOUT {
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
            let index = random.usize(..64);
            kept[index] = input;
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

/// Runs the fuzzer for some seconds (`TONIC_RDMA_FUZZ_SECONDS`), from a seed (`TONIC_RDMA_FUZZ_SEED`), or
/// runs one input (`TONIC_RDMA_FUZZ_INPUT`).
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
