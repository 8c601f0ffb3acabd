//! The machine that a run is made on: its name, its free memory, and the costs of its basic operations: a
//! round trip between two threads, a system call, and a copy. The figures of two machines can't be compared
//! without these costs: a small call over TCP is mostly wake-ups and system calls, a small call over RDMA has
//! none of them at best, and a large call is mostly copies.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use std::{fs, thread};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use serde::Serialize;
use tonic_rdma::unstable::Processors;
use tonic_rdma_commands::cores::{self, Cores};
use tonic_rdma_commands::ends::Machine;
use tonic_rdma_commands::output::Optimised;
use tonic_rdma_commands::{Named as _, units};

use crate::measure::process::Allocator;

/// Time to measure each cost.
const LENGTH: Duration = Duration::from_millis(10);

/// Round trips between two readings of the clock, because one round trip is hardly longer than a reading.
const SPINS: u32 = 64;

/// Bytes that are copied: more than the caches of a core hold.
const COPY: usize = 16 << 20;

/// Round trips between two threads, each on a core of its own if there are two, and other costs: medians.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Costs {
    /// A round trip of two threads that poll a word of memory without ever sleeping; absent if they share one
    /// core.
    pub(crate) spin_us: Option<f64>,
    /// A round trip of two threads that sleep and wake one another by eventfd; absent if it could not be
    /// measured.
    pub(crate) wake_us: Option<f64>,
    /// A system call that does next to nothing.
    pub(crate) syscall_us: Option<f64>,
    /// A copy of 16 MiB within one thread, in 10⁹ bytes a second.
    pub(crate) memcpy_gbytes_per_s: Option<f64>,
}

impl Costs {
    /// Measures the costs, for some 50 ms.
    pub(crate) fn measure() -> Self {
        let cores = Cores::choose();
        Self {
            spin_us: cores.and_then(spin).map(micros),
            wake_us: wake(cores).map(micros),
            syscall_us: system_call().map(micros),
            memcpy_gbytes_per_s: copy().map(|took| COPY as f64 / took.as_secs_f64() / 1e9),
        }
    }

    /// Says if these are not the costs of the machine, because something else had its cores meanwhile.
    fn warning(&self) -> Option<String> {
        /// Far above that of any two cores, in microseconds.
        const SPIN: f64 = 10.0;
        let spin = self.spin_us.filter(|spin| *spin > SPIN).map(units::micros)?;
        Some(format!(
            "a round trip of two threads that spin took {spin}, because others had the cores before the run"
        ))
    }

    /// Describes the costs in words.
    pub(crate) fn summary(&self) -> String {
        let took = |micros: Option<f64>| micros.map_or_else(|| "unknown".to_owned(), units::micros);
        let (spin, wake) = (took(self.spin_us), took(self.wake_us));
        let call = took(self.syscall_us);
        let copy = self.memcpy_gbytes_per_s.map_or_else(|| "unknown".to_owned(), units::digits);
        format!(
            "a round trip between two threads takes {spin} where both spin, {wake} where both sleep; a system call takes {call}; \
             memcpy does {copy} GB/s"
        )
    }
}

fn micros(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

/// The value that ends the measurement.
const OVER: u64 = u64::MAX;

/// Measures a system call.
fn system_call() -> Option<Duration> {
    median_of(|| {
        let start = Instant::now();
        for _ in 0..SPINS {
            std::hint::black_box(rustix::process::getppid());
        }
        Some(start.elapsed() / SPINS)
    })
}

/// Measures a copy into memory that was written before.
fn copy() -> Option<Duration> {
    let (from, mut to) = (vec![1_u8; COPY], vec![2_u8; COPY]);
    median_of(|| {
        let start = Instant::now();
        to.copy_from_slice(std::hint::black_box(&from));
        std::hint::black_box(&mut to);
        Some(start.elapsed())
    })
}

/// Measures a round trip of a word that one thread makes odd and the other thread makes even.
fn spin(cores: Cores) -> Option<Duration> {
    let word = AtomicU64::new(0);
    let answer = || loop {
        match word.load(Ordering::Acquire) {
            OVER => return,
            odd if odd % 2 == 1 => word.store(odd + 1, Ordering::Release),
            _ => std::hint::spin_loop(),
        }
    };
    let mut next = 1;
    let ask = || {
        let start = Instant::now();
        for _ in 0..SPINS {
            word.store(next, Ordering::Release);
            while word.load(Ordering::Acquire) == next {
                std::hint::spin_loop();
            }
            next += 2;
        }
        Some(start.elapsed() / SPINS)
    };
    round_trips(Some(cores), answer, ask, || word.store(OVER, Ordering::Release))
}

/// Measures a round trip of two counters. A thread sleeps until its counter changes.
fn wake(cores: Option<Cores>) -> Option<Duration> {
    let counter = || eventfd(0, EventfdFlags::CLOEXEC).ok();
    let (ping, pong) = (counter()?, counter()?);
    let answer = || while take(&ping) == Some(1) && give(&pong, 1).is_some() {};
    let ask = || {
        let start = Instant::now();
        give(&ping, 1)?;
        take(&pong)?;
        Some(start.elapsed())
    };
    // Any other number ends the measurement.
    round_trips(cores, answer, ask, || {
        let _ = give(&ping, 2);
    })
}

/// Returns the median time of `ask`, on a thread of its own. Meanwhile another thread answers, until `end` is
/// called. Each thread is on a core of its own, if there are `cores`.
fn round_trips(
    cores: Option<Cores>,
    answer: impl FnOnce() + Send,
    ask: impl FnMut() -> Option<Duration> + Send,
    end: impl FnOnce() + Send,
) -> Option<Duration> {
    thread::scope(|scope| {
        scope.spawn(move || {
            let _ = cores.map(|cores| cores::pin(cores.server));
            answer();
        });
        let timed = scope.spawn(move || {
            let _ = cores.map(|cores| cores::pin(cores.client));
            let median = median_of(ask);
            end();
            median
        });
        timed.join().ok().flatten()
    })
}

/// Adds `number` to a counter.
fn give(counter: &OwnedFd, number: u64) -> Option<()> {
    rustix::io::write(counter, &number.to_ne_bytes()).ok().map(drop)
}

/// Sleeps until a counter is not zero, and resets it. Returns its value.
fn take(counter: &OwnedFd) -> Option<u64> {
    let mut number = [0; 8];
    loop {
        match rustix::io::read(counter, &mut number) {
            Ok(_) => return Some(u64::from_ne_bytes(number)),
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return None,
        }
    }
}

/// Calls `sample` again and again for [`LENGTH`], at least once. Returns the median of the results.
fn median_of(mut sample: impl FnMut() -> Option<Duration>) -> Option<Duration> {
    let mut samples = Vec::with_capacity(1 << 12);
    let start = Instant::now();
    loop {
        samples.push(sample()?);
        if start.elapsed() >= LENGTH {
            samples.sort_unstable();
            return samples.get(samples.len() / 2).copied();
        }
    }
}

/// What disturbs the figures of a run: other work on this machine, and limits of CPU time. It counts from the
/// start of the run.
#[derive(Clone, Debug)]
pub(crate) struct Watch {
    start: Instant,
    before: Disturbances,
}

impl Watch {
    pub(crate) fn start() -> Self {
        Self { start: Instant::now(), before: Disturbances::read() }
    }

    /// Describes what has disturbed the run: nothing, if the list is empty. Child processes have to be over and
    /// waited for. Before, their work counts as that of others.
    pub(crate) fn warnings(&self) -> Vec<String> {
        (Disturbances::read() - self.before).describe(self.start.elapsed(), Machine::this().cores())
    }
}

/// Seconds of CPU time since the machine was started.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Disturbances {
    /// User and system time of all processes, and of this one with its children.
    all: f64,
    own: f64,
    /// What a hypervisor gave to other machines.
    stolen: f64,
    /// How long threads of this control group waited, because its CPU limit was used up.
    throttled: f64,
}

impl std::ops::Sub for Disturbances {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        Self {
            all: self.all - earlier.all,
            own: self.own - earlier.own,
            stolen: self.stolen - earlier.stolen,
            throttled: self.throttled - earlier.throttled,
        }
    }
}

impl Disturbances {
    fn read() -> Self {
        let [all, stolen] =
            fs::read_to_string("/proc/stat").ok().and_then(|text| cpu(&text)).unwrap_or_default();
        let own = cores::cpu_time() + cores::cpu_time_of_children();
        let files = Processors::groups()
            .into_iter()
            .filter_map(|folder| fs::read_to_string(folder.join("cpu.stat")).ok());
        let throttled = files.map(|text| throttled(&text)).fold(0.0, f64::max);
        Self { all, own: own.as_secs_f64(), stolen, throttled }
    }

    /// Describes what was too much in a run of this `length`.
    fn describe(self, length: Duration, cores: usize) -> Vec<String> {
        let Self { all, own, stolen, throttled } = self;
        let length = length.as_secs_f64();
        let cpus = |seconds: f64| seconds / length;
        let share = |seconds: f64| cpus(seconds) / cores as f64;
        let mut said = Vec::new();
        if share(all - own) > OTHERS {
            said.push(format!("other processes used {:.1} of {cores} CPUs during the run", cpus(all - own)));
        }
        if share(stolen) > STOLEN {
            said.push(format!("the hypervisor gave {:.1} of {cores} CPUs to other machines", cpus(stolen)));
        }
        if throttled > 0.0 {
            let length = units::micros(throttled * 1e6);
            said.push(format!("the CPU limit of this control group stopped threads for {length} in all"));
        }
        said
    }
}

/// The shares of all CPUs that other processes, and a hypervisor, may use before a warning.
const OTHERS: f64 = 0.1;
const STOLEN: f64 = 0.02;

/// Returns the seconds of user and system time, and of stolen time, of a text as `/proc/stat`.
fn cpu(text: &str) -> Option<[f64; 2]> {
    let line = text.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let ticks: Vec<f64> = line.split_whitespace().filter_map(|field| field.parse().ok()).collect();
    let [user, nice, system, _, _, _, _, stolen, ..] = ticks[..] else { return None };
    // The time of interrupts belongs to no process.
    let second = rustix::param::clock_ticks_per_second() as f64;
    Some([(user + nice + system) / second, stolen / second])
}

/// Returns the seconds for which a control group was throttled, of a text as its `cpu.stat`.
fn throttled(text: &str) -> f64 {
    let of = |name: &str, unit: f64| {
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<f64>().ok());
        value.map(|value| value * unit)
    };
    // Of version 2 and of version 1.
    of("throttled_usec ", 1e-6).or_else(|| of("throttled_time ", 1e-9)).unwrap_or(0.0)
}

/// The facts that every run has.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Environment {
    /// The RDMA provider in use; `none` if no mode needs one.
    provider: String,
    version: &'static str,
    allocator: &'static str,
    machine: Machine,
    /// The costs of basic operations on this machine, measured before the run.
    round_trips: Costs,
    /// What makes the figures doubtful.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    warnings: Vec<String>,
    optimised: Optimised,
}

impl Environment {
    pub(crate) fn new(provider: Option<String>, costs: Costs, warnings: Vec<String>) -> Self {
        let warnings = costs.warning().into_iter().chain(warnings).collect();
        Self {
            provider: provider.unwrap_or_else(|| "none".to_owned()),
            version: env!("CARGO_PKG_VERSION"),
            allocator: Allocator::of_this_process().name(),
            machine: Machine::this(),
            round_trips: costs,
            warnings,
            optimised: Optimised::default(),
        }
    }

    /// Returns the facts as pairs of name and value, for people, with `lines` of the command after them.
    /// `where_in`: the processes that have the allocator.
    pub(crate) fn with(
        &self,
        where_in: &str,
        lines: Vec<(&'static str, String)>,
    ) -> Vec<(&'static str, String)> {
        let mut all = vec![
            ("provider", self.provider.clone()),
            ("allocator", format!("{} in {where_in} processes, for all modes", self.allocator)),
            ("machine", self.machine.to_string()),
            ("this machine", self.round_trips.summary()),
        ];
        all.extend(lines);
        all.extend(self.warnings.iter().map(|warning| ("warning", warning.clone())));
        if !self.optimised.0 {
            let build = "UNOPTIMISED: build with --release for figures that mean something";
            all.push(("build", build.to_owned()));
        }
        all
    }
}

/// Returns `MemAvailable` of /proc/meminfo, in bytes.
pub(crate) fn available() -> Option<u64> {
    kibibytes(&fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable:")
}

/// Says that memory is lacking.
pub(crate) fn lacking(needed: u64, available: u64) -> String {
    let [needed, available] = [needed, available].map(units::rough_size);
    format!("needs about {needed} of memory and {available} are available")
}

/// Returns the value of the line `name` in a text of the kernel that gives it in kB, in bytes.
pub(crate) fn kibibytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use super::*;

    #[test]
    fn all_costs_are_measured_if_there_are_two_cores() {
        let costs = Costs::measure();
        assert_eq!(costs.spin_us.is_some(), Cores::choose().is_some());
        assert!(costs.syscall_us > Some(0.0) && costs.memcpy_gbytes_per_s > Some(0.0));
        assert!(costs.wake_us.unwrap() > 0.0 && costs.spin_us.is_none_or(|spin| spin > 0.0));
    }

    #[test]
    fn costs_that_could_not_be_measured_are_unknown() {
        let costs =
            Costs { spin_us: None, wake_us: Some(14.0), syscall_us: Some(0.5), memcpy_gbytes_per_s: None };
        let summary = costs.summary();
        assert!(summary.contains("unknown where both spin, 14.0 µs where both sleep"), "{summary}");
        assert!(summary.contains("a system call takes 0.50 µs; memcpy does unknown"), "{summary}");
        assert_eq!(costs.warning(), None);
        let [quiet, busy] = [0.5, 307.0].map(|spin| Costs { spin_us: Some(spin), ..costs }.warning());
        assert!(quiet.is_none() && busy.is_some_and(|text| text.contains("spin took 307 µs")));
    }

    #[test]
    fn a_run_that_was_disturbed_says_by_what() {
        let second = rustix::param::clock_ticks_per_second();
        let text = |user: u64, steal: u64| {
            format!(
                "cpu  {} {second} {second} 7 7 9999 9999 {} 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n",
                user * second,
                steal * second
            )
        };
        assert_eq!((cpu(&text(8, 3)), cpu("cpu 1 2\n"), cpu("")), (Some([10.0, 3.0]), None, None));
        assert_eq!(throttled("nr_throttled 9\nthrottled_usec 1500000\n"), 1.5);
        assert_eq!(throttled("nr_throttled 9\nthrottled_time 2500000000\n"), 2.5);
        assert_eq!(throttled("nr_periods 0\n"), 0.0);
        let ten = Duration::from_secs(10);
        let of = |all, own, stolen, throttled| Disturbances { all, own, stolen, throttled }.describe(ten, 2);
        assert!(of(21.9, 20.0, 0.3, 0.0).is_empty());
        // Rounding may give a process more than all processes have.
        assert!(of(9.0, 9.1, 0.0, 0.0).is_empty());
        assert_eq!(
            of(20.0, 5.0, 5.0, 2.5),
            [
                "other processes used 1.5 of 2 CPUs during the run",
                "the hypervisor gave 0.5 of 2 CPUs to other machines",
                "the CPU limit of this control group stopped threads for 2.50 s in all"
            ]
        );
    }

    /// A process that is no child, as far as this one can tell, because it was not waited for.
    #[test]
    fn another_process_that_is_busy_is_noticed() {
        let mut busy = std::process::Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
        let before = Disturbances::read();
        let used = (0..600).any(|_| {
            std::thread::sleep(Duration::from_millis(100));
            let seen = Disturbances::read() - before;
            seen.all - seen.own > 0.1
        });
        busy.kill().unwrap();
        busy.wait().unwrap();
        assert!(used);
    }

    #[test]
    fn lines_of_the_kernel_are_parsed() {
        let text = "00400000-7ff [rollup]\nRss: 2 kB\nPss:                 103 kB\nSwap: many kB\n";
        assert_eq!((kibibytes(text, "Pss:"), kibibytes(text, "Swap:")), (Some(103 << 10), None));
        assert!(available().is_some_and(|bytes| bytes > 0));
    }

    #[test]
    fn one_core_is_enough_for_threads_that_sleep() {
        assert!(wake(None).is_some());
    }
}
