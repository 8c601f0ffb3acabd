//! Child processes on another host. The listening end starts them for one caller at a time, and the caller
//! has them as [`Child`]ren like those that it starts itself.
//!
//! ```text
//!  caller                                              listening end
//!    hello: program, version, facts ────────────────▶  takes the only seat, or is refused
//!    ◀───────────────────── welcome: facts, clock ───
//!    start, line, close, kill of a child ───────────▶  the child's stdin
//!    ◀────────── line, end or refusal of a child ────  the child's stdout and status
//!    ◀─ alive, every two seconds, in both directions ▶
//! ```
//!
//! A message is a line of JSON over TCP. An end that hears nothing for 15 s gives the other one up. The end
//! of the connection ends all children of the caller.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Command, ExitStatus};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tonic_rdma_verbs::unstable::lock;

use crate::failure::{Context as _, Failure, one_line};
use crate::process::{Child, Event, how_ended, join_within, report_line};
use crate::signals::Signals;

/// Time between two signs of life.
const BEAT: Duration = Duration::from_secs(2);
/// Time without a byte after which the other end is given up, and time that it may take to accept bytes.
const SILENCE: Duration = Duration::from_secs(15);
/// Longest time for a connection, and for the hello.
const GREETING: Duration = Duration::from_secs(5);
/// Longest hello, and longest message of a caller, in bytes.
const LONGEST_HELLO: usize = 64 << 10;
const LONGEST_REQUEST: u64 = 128 << 10;
/// Longest message of a child, in bytes.
const LONGEST_REPORT: u64 = 256 << 20;
/// The largest number of callers that are greeted at once.
const MOST_GREETED: usize = 16;
/// The largest number of children of a caller.
pub const MOST_CHILDREN: usize = 8;
/// Messages of a caller that wait, and lines that a child has not read.
const WAITING: usize = 4;
const UNREAD: usize = 64;
/// Time for an end by a signal. After that the process ends in any case.
const ENDING: Duration = Duration::from_secs(5);
/// Longest text of a refusal, in characters.
const LONGEST_REASON: usize = 1000;

/// The first line of a caller.
#[derive(Debug, Serialize, Deserialize)]
struct Hello {
    program: String,
    version: String,
    facts: Value,
}

/// The first line of the listening end.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Greeting {
    /// What this end is, and its clock in nanoseconds since 1970.
    Welcome {
        facts: Value,
        clock: u64,
    },
    Refused(String),
}

/// What a caller tells: about the child of this number, or nothing.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Told {
    Start { child: u32, name: String, job: Value },
    Line { child: u32, line: String },
    Close { child: u32 },
    Kill { child: u32 },
    Alive,
}

/// What the listening end says.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Said {
    Line {
        child: u32,
        line: String,
    },
    /// The child has ended, with the status of `wait` if that is known.
    Ended {
        child: u32,
        status: Option<i32>,
    },
    /// The child was not started.
    Refused {
        child: u32,
        reason: String,
        usage: bool,
    },
    Alive,
}

/// The writing half of a connection.
#[derive(Debug)]
struct Sender {
    stream: Mutex<TcpStream>,
}

impl Sender {
    fn new(stream: &TcpStream) -> io::Result<Arc<Self>> {
        stream.set_nodelay(true)?;
        Ok(Arc::new(Self { stream: Mutex::new(stream.try_clone()?) }))
    }

    /// Sends a message. A connection that does not take all of it in time ends.
    fn send(&self, message: &impl Serialize) -> io::Result<()> {
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        let mut stream = lock(&self.stream);
        let sent = write_within(&mut stream, &line, SILENCE);
        if sent.is_err() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        sent
    }

    fn shutdown(&self, how: Shutdown) {
        // It fails only if the connection has ended.
        let _ = lock(&self.stream).shutdown(how);
    }

    /// Sends a sign of life now and then, until the connection ends.
    fn keep_alive(self: &Arc<Self>, alive: impl Serialize + Send + 'static) -> io::Result<()> {
        let sender = Arc::downgrade(self);
        let beat = move || {
            while sender.upgrade().is_some_and(|sender| sender.send(&alive).is_ok()) {
                thread::sleep(BEAT);
            }
        };
        thread::Builder::new().name("alive".to_owned()).spawn(beat).map(drop)
    }
}

/// Writes all bytes within `limit`.
fn write_within(stream: &mut TcpStream, mut bytes: &[u8], limit: Duration) -> io::Result<()> {
    let end = Instant::now() + limit;
    while !bytes.is_empty() {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_write_timeout(Some(left))?;
        match stream.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => bytes = &bytes[count..],
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Hands each message to `each` until the connection ends. Returns why it ended.
fn receive<M: DeserializeOwned>(stream: &TcpStream, longest: u64, mut each: impl FnMut(M)) -> String {
    if let Err(error) = stream.set_read_timeout(Some(SILENCE)) {
        return error.to_string();
    }
    let (mut stream, mut line) = (BufReader::new(stream), Vec::new());
    loop {
        line.clear();
        match stream.by_ref().take(longest).read_until(b'\n', &mut line) {
            Ok(0) => return "it closed the connection".to_owned(),
            Ok(length) if length as u64 == longest && line.last() != Some(&b'\n') => {
                return format!("it sent a line of more than {longest} bytes");
            }
            Ok(_) => {}
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                return format!("it said nothing for {} s", SILENCE.as_secs());
            }
            Err(error) => return format!("the connection broke: {error}"),
        }
        match serde_json::from_slice(&line) {
            Ok(message) => each(message),
            Err(error) => return format!("it sent a line that is no message: {error}"),
        }
    }
}

fn clock() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

/// The end of a connection that listens.
#[derive(Debug)]
pub struct Listener {
    listener: TcpListener,
    address: SocketAddr,
    program: &'static str,
    facts: Value,
}

/// The wish of a caller: a child.
#[derive(Debug)]
pub struct Request {
    /// The address of this host that the caller has called.
    pub ip: IpAddr,
    /// The address of the caller.
    pub caller: IpAddr,
    /// What the child needs to know.
    job: Value,
}

impl Request {
    /// Returns what the child needs to know.
    ///
    /// # Errors
    ///
    /// Fails if the caller sent something else.
    pub fn job<J: DeserializeOwned>(&self) -> Result<J, Failure> {
        let job = J::deserialize(&self.job);
        job.map_err(|error| Failure::usage("the request for a process can't be read").because(error))
    }
}

/// What happens at the listening end.
enum Happening {
    Called(SocketAddr, IpAddr, Arc<Sender>),
    Told(Told),
    /// The caller has gone, for this reason.
    Gone(String),
    /// A signal asks this process to end.
    Signal,
}

/// The only seat, and who has it since when.
type Seat = Arc<Mutex<Option<(SocketAddr, Instant)>>>;

/// What greets callers.
#[derive(Clone)]
struct Greeter {
    program: &'static str,
    facts: Value,
    seat: Seat,
    happenings: SyncSender<Happening>,
}

impl Listener {
    /// Listens on `address`, `HOST:PORT`. `program` names what callers have to be, and `facts` is what they
    /// get to know of this end.
    ///
    /// # Errors
    ///
    /// Fails if `address` is no address, or can't be listened on.
    pub fn bind(program: &'static str, address: &str, facts: &impl Serialize) -> Result<Self, Failure> {
        let failed = || format!("can't listen on {address}");
        let listener = TcpListener::bind(&resolve("--listen", address)?[..]).context(failed())?;
        let local = listener.local_addr().context(failed())?;
        let facts = serde_json::to_value(facts).context(failed())?;
        Ok(Self { listener, address: local, program, facts })
    }

    /// Returns the address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves callers until SIGINT or SIGTERM comes, and says on stdout what it does. `start` makes the
    /// command of a child, and a description of it, or refuses the child.
    ///
    /// # Errors
    ///
    /// Fails if the system has no threads, or if stdout can't be written.
    pub fn serve(
        self,
        mut start: impl FnMut(&Request) -> Result<(String, Command), Failure>,
    ) -> Result<(), Failure> {
        let seat = Seat::default();
        let (happenings, happened) = sync_channel(WAITING);
        end_by_signals(happenings.clone())?;
        let greeter = Greeter {
            program: self.program,
            facts: self.facts,
            seat: Arc::clone(&seat),
            happenings: happenings.clone(),
        };
        let listener = self.listener;
        let accept = move || accept_all(&listener, &greeter);
        thread::Builder::new().name("callers".to_owned()).spawn(accept).context("can't start a thread")?;
        let mut session: Option<Session> = None;
        for happening in happened {
            match (happening, &mut session) {
                (Happening::Signal, _) => break,
                (Happening::Called(caller, ip, sender), session) => {
                    *session = Some(Session {
                        caller,
                        ip,
                        sender,
                        since: Instant::now(),
                        children: BTreeMap::new(),
                    });
                }
                (Happening::Told(told), Some(session)) => session.carry_out(told, &mut start)?,
                (Happening::Gone(reason), session) => {
                    let left = session.take().map(|Session { caller, since, children, .. }| {
                        drop(children);
                        format!("{caller} has left after {:.1} s: {reason}", since.elapsed().as_secs_f64())
                    });
                    *lock(&seat) = None;
                    left.map_or(Ok(()), report_line)?;
                }
                (Happening::Told(_), None) => {}
            }
        }
        drop(session);
        report_line("ended by a signal")
    }
}

/// Says when SIGINT or SIGTERM comes.
fn end_by_signals(happenings: SyncSender<Happening>) -> Result<(), Failure> {
    let failed = "can't listen for signals";
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context(failed)?;
    let mut signals = runtime.block_on(async { Signals::new() })?;
    let wait = move || {
        runtime.block_on(signals.next());
        // It fails if nothing is served any more, or if messages of a caller wait.
        if let Err(TrySendError::Full(signal)) = happenings.try_send(Happening::Signal) {
            let late = move || drop(happenings.send(signal));
            drop(thread::Builder::new().name("signal".to_owned()).spawn(late));
        }
        // The children end when their stdin does.
        thread::sleep(ENDING);
        let _ = report_line("ended by a signal, before all processes had ended");
        #[expect(
            clippy::disallowed_methods,
            reason = "a child that can't be waited for must not keep this process"
        )]
        std::process::exit(1);
    };
    thread::Builder::new().name("signals".to_owned()).spawn(wait).map(drop).context(failed)
}

fn accept_all(listener: &TcpListener, greeter: &Greeter) {
    let greeted = Arc::new(AtomicUsize::new(0));
    for stream in listener.incoming() {
        let Ok(mut stream) = stream else {
            // Without descriptors, the next attempt would fail at once too.
            thread::sleep(Duration::from_millis(100));
            continue;
        };
        if greeted.fetch_add(1, Ordering::AcqRel) >= MOST_GREETED {
            greeted.fetch_sub(1, Ordering::AcqRel);
            refuse_one_of_many(&mut stream);
            continue;
        }
        let (greeter, count) = (greeter.clone(), Arc::clone(&greeted));
        let serve = move || {
            greeter.serve(stream);
            count.fetch_sub(1, Ordering::AcqRel);
        };
        if thread::Builder::new().name("caller".to_owned()).spawn(serve).is_err() {
            greeted.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

/// Says that too many callers are greeted. The buffer of a new connection has room for that.
fn refuse_one_of_many(stream: &mut TcpStream) {
    let reason = format!("{MOST_GREETED} callers say at this moment what they are: call again");
    if stream.set_nonblocking(true).is_ok()
        && let Ok(mut line) = serde_json::to_vec(&Greeting::Refused(reason))
    {
        line.push(b'\n');
        // The caller may have gone.
        let _ = stream.write_all(&line);
    }
}

impl Greeter {
    /// Greets a caller, and receives what it tells until it is gone.
    fn serve(self, stream: TcpStream) {
        let (Ok(caller), Ok(local), Ok(sender)) =
            (stream.peer_addr(), stream.local_addr(), Sender::new(&stream))
        else {
            return;
        };
        let admitted = self.admit(&stream, caller);
        let about = match admitted {
            Ok(hello) => hello,
            Err(reason) => {
                // The caller may have gone, and so may the reader of stdout.
                let _ = sender.send(&Greeting::Refused(reason.clone()));
                let _ = report_line(format!("{caller} is refused: {reason}"));
                return;
            }
        };
        let _ = report_line(format!("{caller} calls: {}", one_line(&about)));
        let facts = self.facts;
        let welcomed = sender.send(&Greeting::Welcome { facts, clock: clock() });
        if self
            .happenings
            .send(Happening::Called(caller, local.ip().to_canonical(), Arc::clone(&sender)))
            .is_err()
        {
            return;
        }
        let reason = match welcomed.and_then(|()| sender.keep_alive(Said::Alive)) {
            Ok(()) => receive(&stream, LONGEST_REQUEST, |told| {
                drop(self.happenings.send(Happening::Told(told)));
            }),
            Err(error) => error.to_string(),
        };
        drop(self.happenings.send(Happening::Gone(reason)));
        // The caller waits for the end of the connection, and the seat is free by then.
        let end = Instant::now() + SILENCE;
        while lock(&self.seat).is_some_and(|(seated, _)| seated == caller) && Instant::now() < end {
            thread::sleep(Duration::from_millis(2));
        }
        sender.shutdown(Shutdown::Both);
    }

    /// Reads the hello, and gives the caller the seat. Returns what the caller is, or why it is refused.
    fn admit(&self, stream: &TcpStream, caller: SocketAddr) -> Result<String, String> {
        let line = read_hello(stream).map_err(|error| format!("it did not say what it is: {error}"))?;
        let hello: Hello = serde_json::from_slice(&line)
            .map_err(|error| format!("it did not say what it is: {error}; call by --server"))?;
        let Hello { program, version, facts } = hello;
        if program != self.program {
            return Err(format!(
                "this end is {} --listen, and the caller is {}: use one command at both ends",
                self.program,
                one_line(&program)
            ));
        }
        if version != env!("CARGO_PKG_VERSION") {
            let (ours, theirs) = (env!("CARGO_PKG_VERSION"), one_line(&version));
            return Err(format!(
                "this end has version {ours}, and the caller {theirs}: use one version at both ends"
            ));
        }
        let mut seat = lock(&self.seat);
        if let Some((other, since)) = *seat {
            return Err(format!(
                "busy with {other} since {:.0} s: this end serves one caller at a time",
                since.elapsed().as_secs_f64()
            ));
        }
        *seat = Some((caller, Instant::now()));
        Ok(format!("{program} {version}, {}", text_of(&facts)))
    }
}

/// Returns the text of facts: a text, or JSON.
fn text_of(facts: &Value) -> String {
    facts["text"].as_str().map_or_else(|| facts.to_string(), str::to_owned)
}

/// Reads the first line of the other end, and nothing of the next.
fn read_hello(mut stream: &TcpStream) -> io::Result<Vec<u8>> {
    let end = Instant::now() + GREETING;
    let (mut line, mut byte) = (Vec::new(), [0]);
    while byte != [b'\n'] {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::Error::new(io::ErrorKind::TimedOut, format!("not within {GREETING:?}")));
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut byte) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) => line.extend(byte),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        if line.len() > LONGEST_HELLO {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the line is too long"));
        }
    }
    Ok(line)
}

/// The caller that has the seat, and its children.
struct Session {
    caller: SocketAddr,
    ip: IpAddr,
    sender: Arc<Sender>,
    since: Instant,
    children: BTreeMap<u32, Served>,
}

/// A child of the caller. A thread writes the lines for it, because the child may not read them.
struct Served {
    /// Dropped first, so that the thread's write fails.
    _process: Child,
    /// `None` after the caller has closed the child's stdin.
    lines: Option<SyncSender<String>>,
}

impl Session {
    /// Carries out what the caller has told. An answer that can't be sent ends the connection, which is
    /// noticed elsewhere.
    fn carry_out(
        &mut self,
        told: Told,
        start: &mut impl FnMut(&Request) -> Result<(String, Command), Failure>,
    ) -> Result<(), Failure> {
        match told {
            Told::Alive => {}
            Told::Line { child, line } => {
                let served = self.children.get(&child).and_then(|served| served.lines.as_ref());
                if let Some(Err(TrySendError::Full(_))) = served.map(|lines| lines.try_send(line)) {
                    report_line(format!("{}: ends a process that reads nothing", self.caller))?;
                    self.children.remove(&child);
                }
            }
            Told::Close { child } => {
                if let Some(served) = self.children.get_mut(&child) {
                    served.lines = None;
                }
            }
            Told::Kill { child } => drop(self.children.remove(&child)),
            Told::Start { child, name, job } => {
                let request = Request { ip: self.ip, caller: self.caller.ip().to_canonical(), job };
                match self.start(child, &name, &request, start) {
                    Ok(what) => report_line(format!("{}: starts {what}", self.caller))?,
                    Err(failure) => {
                        let reason: String = failure.with_causes().chars().take(LONGEST_REASON).collect();
                        report_line(format!("{}: starts nothing: {reason}", self.caller))?;
                        let _ = self.sender.send(&Said::Refused { child, reason, usage: failure.is_usage() });
                    }
                }
            }
        }
        Ok(())
    }

    fn start(
        &mut self,
        number: u32,
        name: &str,
        request: &Request,
        start: &mut impl FnMut(&Request) -> Result<(String, Command), Failure>,
    ) -> Result<String, Failure> {
        if self.children.len() >= MOST_CHILDREN || self.children.contains_key(&number) {
            return Err(Failure::usage(format!("no caller has more than {MOST_CHILDREN} processes here")));
        }
        let (what, mut command) = start(request)?;
        // So that ctrl-c reaches this process alone, which then ends its children.
        command.process_group(0);
        let (sender, caller) = (Arc::clone(&self.sender), self.caller);
        let name = one_line(name);
        let of = name.clone();
        let sink = move |event: Event<String>| {
            let said = match event {
                Event::Report(line) | Event::Garbage(line) => Said::Line { child: number, line },
                Event::Ended(status) => {
                    let _ = report_line(format!("{caller}: {of} {}", how_ended(status)));
                    Said::Ended { child: number, status: status.map(ExitStatus::into_raw) }
                }
                // The children here are not those of another host.
                Event::Lost(_) | Event::Refused { .. } => return false,
            };
            sender.send(&said).is_ok()
        };
        let mut process = Child::start(&name, command, sink)?;
        let (lines, unread) = sync_channel::<String>(UNREAD);
        if let Some(mut stdin) = process.take_stdin() {
            // The end of the child, or of its lines, ends the thread.
            let write =
                move || unread.iter().try_for_each(|line| stdin.write_all(format!("{line}\n").as_bytes()));
            thread::Builder::new().name(name.clone()).spawn(write).context("can't start a thread")?;
        }
        self.children.insert(number, Served { _process: process, lines: Some(lines) });
        Ok(format!("{name}: {what}"))
    }
}

/// A host that listens, as its caller has it. The drop of this value gives the seat back.
#[derive(Debug)]
pub struct Host {
    address: String,
    local: IpAddr,
    sender: Arc<Sender>,
    children: Arc<Children>,
    next: AtomicU32,
    reader: Mutex<Option<JoinHandle<()>>>,
}

/// How far the other end's clock is ahead of this one's.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct ClockOffset {
    /// The difference in milliseconds, negative if the other clock is behind.
    pub milliseconds: f64,
    /// By how much the difference may be wrong: half of the round trip, in milliseconds.
    pub within: f64,
}

impl fmt::Display for ClockOffset {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { milliseconds, within } = self;
        let side = if *milliseconds < 0.0 { "behind" } else { "ahead of" };
        write!(
            formatter,
            "the other end's is {:.1} ms {side} this one's (± {within:.1} ms); no figure depends on it, because each time \
             begins and ends by the clock of one end",
            milliseconds.abs()
        )
    }
}

/// The children that run at the other end.
#[derive(Debug, Default)]
struct Children {
    entries: Mutex<HashMap<u32, Entry>>,
    /// Why the connection has ended.
    lost: Mutex<Option<String>>,
}

struct Entry {
    sink: Box<dyn FnMut(Event<String>) -> bool + Send>,
    ended: Arc<Mutex<Option<ExitStatus>>>,
}

impl fmt::Debug for Entry {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Entry").field("ended", &self.ended).finish_non_exhaustive()
    }
}

impl Children {
    /// Hands what the other end said to the child that it is about.
    fn hear(&self, said: Said) {
        let (child, event) = match said {
            Said::Alive => return,
            Said::Line { child, line } => (child, Event::Report(line)),
            Said::Refused { child, reason, usage } => (child, Event::Refused { reason, usage }),
            Said::Ended { child, status } => (child, Event::Ended(status.map(ExitStatus::from_raw))),
        };
        let mut entries = lock(&self.entries);
        let Some(entry) = entries.get_mut(&child) else { return };
        if let Event::Ended(Some(status)) = &event {
            *lock(&entry.ended) = Some(*status);
        }
        let is_last = matches!(event, Event::Ended(_) | Event::Refused { .. });
        if !(entry.sink)(event) || is_last {
            entries.remove(&child);
        }
    }

    /// Tells all children that the connection has ended.
    fn lose(&self, reason: &str) {
        *lock(&self.lost) = Some(reason.to_owned());
        for (_, mut entry) in lock(&self.entries).drain() {
            (entry.sink)(Event::Lost(reason.to_owned()));
        }
    }
}

impl Host {
    /// Calls `address`, `HOST:PORT`, which `option` gave, where the same program listens. `facts` is what the
    /// other end gets to know of this one. Returns what the other end is, too, and how far its clock is ahead.
    ///
    /// # Errors
    ///
    /// Fails if nothing answers there, or if the other end refuses this one: it is busy, or another version.
    pub fn call<F: Serialize + DeserializeOwned>(
        program: &str,
        option: &str,
        address: &str,
        facts: &F,
    ) -> Result<(Arc<Self>, F, ClockOffset), Failure> {
        let stream = connect(option, address)?;
        let failed = || format!("can't talk with {address}");
        let hello = Hello {
            program: program.to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            facts: serde_json::to_value(facts).context(failed())?,
        };
        let sender = Sender::new(&stream).context(failed())?;
        let (asked, at) = (Instant::now(), clock());
        sender.send(&hello).context(failed())?;
        let line = read_hello(&stream)
            .context(format!("no answer from {address}, where {program} --listen has to run"))?;
        let round_trip = asked.elapsed().as_secs_f64() * 1e3;
        let greeting = serde_json::from_slice(&line)
            .context(format!("the answer from {address} is not that of {program} --listen"))?;
        let (facts, theirs) = match greeting {
            Greeting::Welcome { facts, clock } => (F::deserialize(facts), clock),
            Greeting::Refused(reason) => return Err(Failure::run(format!("{address} refused: {reason}"))),
        };
        let facts = facts.context(format!("{address} says nothing useful of itself"))?;
        let within = round_trip / 2.0;
        let clock = ClockOffset { milliseconds: (theirs as f64 - at as f64) / 1e6 - within, within };
        sender.keep_alive(Told::Alive).context(failed())?;
        let local = stream.local_addr().context(failed())?.ip();
        let children = Arc::new(Children::default());
        let (heard, other) = (Arc::clone(&children), address.to_owned());
        let hear = move || {
            let reason = receive(&stream, LONGEST_REPORT, |said| heard.hear(said));
            heard.lose(&format!("the connection to {other} has ended: {reason}"));
        };
        let reader = thread::Builder::new().name("other end".to_owned()).spawn(hear).context(failed())?;
        let (address, next, reader) = (address.to_owned(), AtomicU32::new(0), Mutex::new(Some(reader)));
        Ok((Arc::new(Self { address, local, sender, children, next, reader }), facts, clock))
    }

    /// Returns the address of this host on the way to the other one.
    pub fn local_ip(&self) -> IpAddr {
        self.local
    }

    /// Starts a child at the other end. Its events go to `sink`, as those of [`Child::start`] do; also a refusal
    /// is an event.
    ///
    /// # Errors
    ///
    /// Fails if the job has no JSON form, or the connection has ended.
    pub fn start(
        self: &Arc<Self>,
        name: impl fmt::Display,
        job: &impl Serialize,
        sink: impl FnMut(Event<String>) -> bool + Send + 'static,
    ) -> Result<Child, Failure> {
        let (number, name) = (self.next.fetch_add(1, Ordering::Relaxed), name.to_string());
        let failed = || format!("can't start {name} at {}", self.address);
        let ended = Arc::default();
        let entry = Entry { sink: Box::new(sink), ended: Arc::clone(&ended) };
        lock(&self.children.entries).insert(number, entry);
        let job = serde_json::to_value(job).context(failed())?;
        let start = Told::Start { child: number, name: name.clone(), job };
        let sent = self.sender.send(&start);
        // The loss of the connection may have come before the child was in the table.
        if let Some(reason) = lock(&self.children.lost).clone() {
            return Err(Failure::run(failed()).because(reason));
        }
        sent.context(failed())?;
        Ok(Child::at(name, RemoteProcess { host: Arc::clone(self), number, ended }))
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.sender.shutdown(Shutdown::Write);
        // The other end closes the connection once the seat is free.
        join_within(lock(&self.reader).take(), GREETING);
        self.sender.shutdown(Shutdown::Both);
    }
}

/// A child at the other end.
#[derive(Debug)]
pub(crate) struct RemoteProcess {
    host: Arc<Host>,
    number: u32,
    ended: Arc<Mutex<Option<ExitStatus>>>,
}

impl RemoteProcess {
    /// Sends a line to the child. If the connection has ended, its events say so.
    pub(crate) fn send_line(&self, line: String) {
        let _ = self.host.sender.send(&Told::Line { child: self.number, line });
    }

    /// Closes the child's stdin.
    pub(crate) fn close(&self) {
        let _ = self.host.sender.send(&Told::Close { child: self.number });
    }

    /// Kills the child.
    pub(crate) fn kill(&self) {
        lock(&self.host.children.entries).remove(&self.number);
        let _ = self.host.sender.send(&Told::Kill { child: self.number });
    }

    /// Returns the status with which the child has ended. Fails if nothing more will be heard of the child: it
    /// was not started, or the connection has ended.
    pub(crate) fn status(&self) -> io::Result<Option<ExitStatus>> {
        let is_heard = lock(&self.host.children.entries).contains_key(&self.number);
        match *lock(&self.ended) {
            None if !is_heard => Err(io::ErrorKind::NotConnected.into()),
            ended => Ok(ended),
        }
    }

    /// Returns the address of the other end.
    pub(crate) fn address(&self) -> &str {
        &self.host.address
    }
}

/// Returns the addresses that `HOST:PORT` means. `option` gave it.
fn resolve(option: &str, address: &str) -> Result<Vec<SocketAddr>, Failure> {
    let found = address.to_socket_addrs();
    let found: Vec<SocketAddr> =
        found.map_err(|error| bad_address(option, address).because(error))?.collect();
    if found.is_empty() { Err(bad_address(option, address)) } else { Ok(found) }
}

fn bad_address(option: &str, address: &str) -> Failure {
    Failure::usage(format!("{option}: {address:?} is no HOST:PORT of a host that is known here"))
}

fn connect(option: &str, address: &str) -> Result<TcpStream, Failure> {
    let mut failed = None;
    for found in resolve(option, address)? {
        match TcpStream::connect_timeout(&found, GREETING) {
            Ok(stream) => return Ok(stream),
            Err(error) => failed = Some(error),
        }
    }
    let failure = Failure::run(format!("can't connect to {address}"));
    Err(failed
        .map_or_else(|| Failure::run(format!("{address} has no address")), |error| failure.because(error)))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use std::sync::mpsc::channel;

    use super::*;

    /// A limit that only a test that hangs exceeds.
    const TIMEOUT: Duration = Duration::from_secs(60);

    #[test]
    fn nothing_more_is_heard_of_a_refused_child() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let other = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(b"{\"welcome\":{\"facts\":null,\"clock\":0}}\n").unwrap();
            stream
        });
        let (host, (), _) = Host::call("it", "--server", &address, &()).unwrap();
        let mut other = other.join().unwrap();
        let (sender, events) = channel();
        let child = host.start("the child", &(), move |event| sender.send(event).is_ok()).unwrap();
        let process = RemoteProcess { host: Arc::clone(&host), number: 0, ended: Arc::default() };
        assert_eq!(process.status().unwrap(), None);
        other.write_all(b"{\"refused\":{\"child\":0,\"reason\":\"no\",\"usage\":true}}\n").unwrap();
        let refusal = Event::Refused { reason: "no".to_owned(), usage: true };
        assert_eq!(events.recv_timeout(TIMEOUT).unwrap(), refusal);
        assert!(process.status().is_err());
        assert_eq!(child.wait(TIMEOUT), None);
        drop(other);
    }
}
