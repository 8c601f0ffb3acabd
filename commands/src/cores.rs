//! The cores that processes run on, and what a process has used of them.

use std::io;
use std::ops::{Add, Sub};
use std::time::Duration;

use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::{TimeVal, TimeValLike as _};
use rustix::thread::CpuSet;
use rustix::time::ClockId;

/// The cores of two processes, if there are two to choose from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Cores {
    pub client: usize,
    pub server: usize,
}

impl Cores {
    /// Chooses two of the cores that this process may run on. If possible, the second is not a hardware
    /// thread of the first.
    pub fn choose() -> Option<Self> {
        let allowed = allowed();
        pick(&allowed, siblings(*allowed.first()?))
    }
}

/// Returns the cores that this thread may run on.
pub fn allowed() -> Vec<usize> {
    let set = rustix::thread::sched_getaffinity(None);
    set.map(|set| (0..CpuSet::MAX_CPU).filter(|core| set.is_set(*core)).collect()).unwrap_or_default()
}

/// Picks two of `allowed`, and avoids the hardware threads of the first one's physical core.
fn pick(allowed: &[usize], siblings: Vec<usize>) -> Option<Cores> {
    let (client, rest) = allowed.split_first()?;
    let server = rest.iter().find(|core| !siblings.contains(core)).or(rest.first())?;
    Some(Cores { client: *client, server: *server })
}

/// Returns the hardware threads of `core`'s physical core, or none if the kernel does not list them.
fn siblings(core: usize) -> Vec<usize> {
    let path = format!("/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list");
    std::fs::read_to_string(path).map(|text| core_list(&text)).unwrap_or_default()
}

/// Parses the kernel's notation for sets of cores: `0-3,8`.
fn core_list(text: &str) -> Vec<usize> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse::<usize>().ok()?, last.parse::<usize>().ok()?);
        (last < CpuSet::MAX_CPU).then_some(first..=last)
    };
    text.trim().split(',').filter_map(range).flatten().collect()
}

/// Keeps this thread, and every thread and process that it starts, on `core`.
///
/// # Errors
///
/// Fails if this process may not run on the core, or if no core has that number.
pub fn pin(core: usize) -> io::Result<()> {
    pin_to(&[core])
}

/// Keeps this thread, and every thread and process that it starts, on `cores`.
///
/// # Errors
///
/// Fails if this process may run on none of them, or if there is no core of such a number.
pub fn pin_to(cores: &[usize]) -> io::Result<()> {
    let mut set = CpuSet::new();
    for &core in cores {
        if core >= CpuSet::MAX_CPU {
            let text = format!("cores are 0 to {}", CpuSet::MAX_CPU - 1);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        set.set(core);
    }
    Ok(rustix::thread::sched_setaffinity(None, &set)?)
}

/// Returns the user and system time that all threads of this process have used.
pub fn cpu_time() -> Duration {
    read(ClockId::ProcessCPUTime)
}

/// Returns the user and system time of the child processes that have ended and were waited for, and of theirs.
pub fn cpu_time_of_children() -> Duration {
    let times = getrusage(UsageWho::RUSAGE_CHILDREN).map(|of| [of.user_time(), of.system_time()]);
    let duration = |time: TimeVal| Duration::from_micros(u64::try_from(time.num_microseconds()).unwrap_or(0));
    times.map(|times| times.into_iter().map(duration).sum()).unwrap_or_default()
}

/// Returns the user and system time that this thread has used.
pub fn thread_cpu_time() -> Duration {
    read(ClockId::ThreadCPUTime)
}

/// What all threads of a process have used since it started, also those that have ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// User and system time.
    pub cpu: Duration,
    /// Context switches: how often a thread gave up its core, to sleep or because another thread got it.
    pub switches: u64,
    /// How often a thread slept, so that something had to wake it. These are among the switches.
    pub sleeps: u64,
}

impl Usage {
    /// Returns what this process has used. Without counters of the kernel there are no switches.
    pub fn of_this_process() -> Self {
        let counts = getrusage(UsageWho::RUSAGE_SELF);
        let [sleeps, preemptions] = counts.map_or([0; 2], |of| {
            [of.voluntary_context_switches(), of.involuntary_context_switches()]
                .map(|count| u64::try_from(count).unwrap_or(0))
        });
        Self { cpu: cpu_time(), switches: sleeps + preemptions, sleeps }
    }
}

impl Add for Usage {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        let Self { cpu, switches, sleeps } = other;
        Self { cpu: self.cpu + cpu, switches: self.switches + switches, sleeps: self.sleeps + sleeps }
    }
}

impl Sub for Usage {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        Self {
            cpu: self.cpu.saturating_sub(earlier.cpu),
            switches: self.switches.saturating_sub(earlier.switches),
            sleeps: self.sleeps.saturating_sub(earlier.sleeps),
        }
    }
}

fn read(clock: ClockId) -> Duration {
    let time = rustix::time::clock_gettime(clock);
    // These clocks start at zero, so neither field is ever negative.
    Duration::new(time.tv_sec.try_into().unwrap_or(0), time.tv_nsec.try_into().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[test]
    fn the_second_core_is_not_a_sibling_if_possible() {
        let cores = |client, server| Some(Cores { client, server });
        assert_eq!(pick(&[0, 1, 2, 3], core_list("0-1\n")), cores(0, 2));
        assert_eq!(pick(&[4, 5], core_list("4-5")), cores(4, 5));
        assert_eq!(pick(&[0, 1], Vec::new()), cores(0, 1));
        assert_eq!(pick(&[3], Vec::new()), None);
        assert_eq!(pick(&[], Vec::new()), None);
    }

    #[test]
    fn core_lists_of_the_kernel_are_parsed() {
        assert_eq!(core_list("0,64\n"), [0, 64]);
        assert_eq!(core_list("0-2,5"), [0, 1, 2, 5]);
        assert_eq!(core_list("x,0-99999999999,7"), [7]);
    }

    #[test]
    fn a_thread_stays_on_its_core() {
        let core = *allowed().last().unwrap();
        // The affinity is a thread's own, so that no other test sees it.
        let seen = std::thread::spawn(move || pin(core).map(|()| allowed())).join().unwrap();
        assert_eq!(seen.unwrap(), [core]);
        assert!(pin(CpuSet::MAX_CPU).unwrap_err().to_string().contains("cores are 0 to"));
    }

    #[test]
    fn a_child_counts_when_it_has_ended() {
        let before = cpu_time_of_children();
        let busy = "i=0; while [ $i -lt 50000 ]; do i=$((i + 1)); done";
        assert!(std::process::Command::new("sh").args(["-c", busy]).status().unwrap().success());
        assert!(cpu_time_of_children() > before);
    }

    #[test]
    fn a_thread_that_has_ended_counts() {
        const SLEEPS: u64 = 50;
        let before = Usage::of_this_process();
        let sleep = || (0..SLEEPS).for_each(|_| std::thread::sleep(Duration::from_micros(50)));
        std::thread::spawn(sleep).join().unwrap();
        let used = Usage::of_this_process() - before;
        assert!(used.sleeps >= SLEEPS && used.switches >= used.sleeps, "{used:?}");
        assert!(used.cpu > Duration::ZERO, "{used:?}");
        assert_eq!(used + Usage::default(), used);
    }
}
