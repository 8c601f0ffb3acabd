//! A peer that seldom runs is alive, and is not given up. One that is stopped is found within 15 s. With the
//! default times, a real quota, and a hundred connections.

use std::path::{Path, PathBuf};
use std::process::{Child as Process, Command};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::{sleep, timeout};
use tonic_rdma::{Config, Dialer, EndpointStream, Verdict};

use rustix::process::{Pid, Signal, kill_process};
use support::{Child, Runtime, announce};

const CONNECTIONS: usize = 100;
/// More than four times as long as a hang takes to be found.
const STARVED: Duration = Duration::from_secs(65);
/// What a hang takes to be found, and what a busy machine may add.
const FOUND: Duration = Duration::from_secs(15 + 10);

/// A control group whose processes share a twentieth of a CPU, removed when this is dropped.
struct Group {
    folder: PathBuf,
    loops: Vec<Process>,
}

impl Group {
    /// Makes the group, with a busy loop for each core in it. `None` if that is not permitted.
    fn new() -> Option<Self> {
        let mounts = std::fs::read_to_string("/proc/mounts").ok()?;
        let find = |kind: &str, option: &str| {
            mounts.lines().find_map(|line| match line.split(' ').collect::<Vec<_>>()[..] {
                [_, path, found, options, ..]
                    if found == kind
                        && options.split(',').any(|each| option.is_empty() || each == option) =>
                {
                    Some(PathBuf::from(path))
                }
                _ => None,
            })
        };
        let name = format!("tonic-rdma-starved-{}", std::process::id());
        let make = |above: &Path, quota: &[(&str, &str)]| {
            let group = Self { folder: above.join(&name), loops: Vec::new() };
            std::fs::create_dir(&group.folder).ok()?;
            let is_set =
                |(file, value): &(&str, &str)| std::fs::write(group.folder.join(file), value).is_ok();
            quota.iter().all(is_set).then_some(group)
        };
        let mut group = match (find("cgroup", "cpu"), find("cgroup2", "")) {
            (Some(one), _) => make(&one, &[("cpu.cfs_period_us", "100000"), ("cpu.cfs_quota_us", "5000")]),
            (None, Some(two)) => {
                let _ = std::fs::write(two.join("cgroup.subtree_control"), "+cpu");
                make(&two, &[("cpu.max", "5000 100000")])
            }
            (None, None) => None,
        }?;
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            let process = Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
            group.add(&process);
            group.loops.push(process);
        }
        Some(group)
    }

    fn add(&self, process: &Process) {
        std::fs::write(self.folder.join("cgroup.procs"), process.id().to_string()).unwrap();
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        for process in &mut self.loops {
            let _ = process.kill();
            let _ = process.wait();
        }
        // A process that has ended may be in the group for a moment.
        for _ in 0..100 {
            if std::fs::remove_dir(&self.folder).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

async fn round_trip(stream: &mut EndpointStream) -> std::io::Result<()> {
    stream.write_all(b"are you there?").await?;
    stream.flush().await?;
    stream.read_exact(&mut [0; 14]).await.map(drop)
}

/// Connects with the default times.
async fn connect(peer: &Child) -> Vec<EndpointStream> {
    let dialer = Dialer::new(Config::default().handshake_timeout(Duration::from_secs(60)));
    let mut streams = Vec::new();
    for _ in 0..CONNECTIONS {
        let mut stream = dialer.dial("127.0.0.1", peer.word.parse().unwrap()).await.unwrap();
        assert_eq!(stream.info().verdict(), Verdict::Rdma, "{}", stream.info().reason());
        round_trip(&mut stream).await.unwrap();
        streams.push(stream);
    }
    streams
}

#[test]
#[ignore = "takes two minutes"]
fn a_starved_peer_is_not_given_up_and_a_stopped_one_is() {
    let Some(group) = Group::new() else {
        println!("skipped: a new control group with a CPU limit is not permitted here");
        return;
    };
    support::raise_open_files();
    super::alone_in_steps(Runtime::MultiThread, async {
        let starved = Child::start(&[], "echo");
        let mut streams = connect(&starved).await;
        group.add(&starved.process);
        let begun = Instant::now();
        // All are silent, so that pings alone tell.
        sleep(STARVED).await;
        let mut slowest = Duration::ZERO;
        for stream in &mut streams {
            let asked = Instant::now();
            timeout(STARVED, round_trip(stream)).await.expect("no answer").expect("a false alarm");
            slowest = slowest.max(asked.elapsed());
        }
        println!(
            "starved for {:?}: {CONNECTIONS} connections live, slowest answer {slowest:?}",
            begun.elapsed()
        );
        drop(streams);

        let stopped = Child::start(&[], "echo");
        let mut streams = connect(&stopped).await;
        signal(&stopped, Signal::STOP);
        let begun = Instant::now();
        for stream in &mut streams {
            let ended = timeout(FOUND.saturating_sub(begun.elapsed()), stream.read(&mut [0])).await;
            let error = ended.expect("a hang that was not found").unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::TimedOut, "{error}");
        }
        println!("stopped: {CONNECTIONS} connections ended after {:?}", begun.elapsed());
    });
}

fn signal(process: &Child, signal: Signal) {
    kill_process(Pid::from_child(&process.process), signal).unwrap();
}

/// As when a virtual machine is paused: neither saw the other in that time, and it counts for neither.
#[test]
#[ignore = "takes half a minute"]
fn processes_that_stood_still_together_keep_their_connection() {
    let server = Child::start(&[], "echo");
    let mut client = Child::start(&[], &format!("idle {}", server.word));
    signal(&server, Signal::STOP);
    // The client's ping is on its way, or will be when it goes on.
    std::thread::sleep(Duration::from_secs(7));
    signal(&client, Signal::STOP);
    std::thread::sleep(Duration::from_secs(20));
    signal(&client, Signal::CONT);
    std::thread::sleep(Duration::from_secs(1));
    signal(&server, Signal::CONT);
    client.tell("go on");
    assert_eq!(client.next_word(), "Ok(())");
}

/// Plays the role `idle`: connects, waits for a line of the parent, and then asks whether the peer is there.
pub(crate) fn play_idle(port: u16) {
    Runtime::CurrentThread.run_for_ever(async move {
        let mut stream = Dialer::new(Config::default()).dial("127.0.0.1", port).await.unwrap();
        round_trip(&mut stream).await.unwrap();
        announce("connected");
        let line = || std::io::stdin().read_line(&mut String::new());
        tokio::task::spawn_blocking(line).await.unwrap().unwrap();
        announce(format!("{:?}", round_trip(&mut stream).await));
    });
}
