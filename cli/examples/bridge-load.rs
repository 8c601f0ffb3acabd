//! Loads a proxy between a TCP client and a TCP server with streams, and checks every byte. `benches/bridge` measures proxies
//! with it.
//!
//! ```text
//! bridge-load serve HOST:PORT                                    prints its port, serves until killed
//! bridge-load up|down|both HOST:PORT BYTES [CONNECTIONS] [SEED]  prints GB/s over all connections and directions
//! bridge-load echo HOST:PORT BYTES ROUNDS                        prints p50 and p99 of a round trip, in µs
//! ```
//!
//! Both ends compute digests of the whole stream, sent and received, and compare them.
#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program of its own")]

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use xxhash_rust::xxh3::Xxh3;

/// Bytes of one write or read.
const PIECE: usize = 256 * 1024;
/// Time that an end waits for a byte. A peer that takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(60);

const UP: u8 = 1;
const DOWN: u8 = 2;
const ECHO: u8 = 4;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match arguments[..] {
        ["serve", address] => serve(address),
        ["up", ref rest @ ..] => load(UP, rest),
        ["down", ref rest @ ..] => load(DOWN, rest),
        ["both", ref rest @ ..] => load(UP | DOWN, rest),
        ["echo", address, bytes, rounds] => number(bytes).and_then(|b| echo(address, b, number(rounds)?)),
        _ => Err(bad(
            "usage: bridge-load serve|up|down|both|echo HOST:PORT [BYTES] [CONNECTIONS|ROUNDS] [SEED]",
        )),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bridge-load: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Answers every connection in its own thread.
fn serve(address: &str) -> io::Result<()> {
    let listener = TcpListener::bind(address)?;
    println!("{}", listener.local_addr()?.port());
    for stream in listener.incoming() {
        let stream = stream?;
        std::thread::spawn(move || {
            if let Err(error) = answer(stream) {
                eprintln!("bridge-load serve: {error}");
            }
        });
    }
    Ok(())
}

fn answer(mut stream: TcpStream) -> io::Result<()> {
    prepare(&stream)?;
    let mut head = [0; 17];
    match stream.read_exact(&mut head) {
        // A proxy that only looks for the server sends nothing.
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
        read => read?,
    }
    let (kind, bytes, seed) = (head[0], word(&head[1..]), word(&head[9..]));
    if kind == ECHO {
        return echo_back(stream);
    }
    let sender = (kind & DOWN != 0).then(|| {
        let mut stream = stream.try_clone()?;
        Ok::<_, io::Error>(std::thread::spawn(move || {
            let digest = send(&mut stream, bytes, !seed)?;
            stream.write_all(&digest.to_le_bytes())
        }))
    });
    let received = if kind & UP != 0 { receive(&mut stream, None)? } else { (0, 0) };
    if let Some(sender) = sender.transpose()? {
        sender.join().map_err(|_| bad("the sender panicked"))??;
    }
    stream.write_all(&received.0.to_le_bytes())?;
    stream.write_all(&received.1.to_le_bytes())?;
    stream.shutdown(Shutdown::Write)
}

fn echo_back(mut stream: TcpStream) -> io::Result<()> {
    let mut piece = vec![0; PIECE];
    loop {
        match stream.read(&mut piece)? {
            0 => return Ok(()),
            count => stream.write_all(&piece[..count])?,
        }
    }
}

/// Runs all connections in parallel, and prints their total throughput.
fn load(kind: u8, rest: &[&str]) -> io::Result<()> {
    let (address, bytes) = match rest {
        [address, bytes, ..] => ((*address).to_owned(), number(bytes)?),
        _ => return Err(bad("HOST:PORT and BYTES are missing")),
    };
    let connections = rest.get(2).map_or(Ok(1), |text| number(text))?.clamp(1, 10_000);
    let seed = rest.get(3).map_or(Ok(1), |text| number(text))?;
    let begun = Instant::now();
    let threads: Vec<_> = (0..connections)
        .map(|index| {
            let address = address.clone();
            std::thread::spawn(move || one(kind, &address, bytes, seed.wrapping_add(index)))
        })
        .collect();
    for thread in threads {
        thread.join().map_err(|_| bad("a connection panicked"))??;
    }
    let moved = bytes * connections * u64::from(kind.count_ones());
    println!("{:.3}", moved as f64 / begun.elapsed().as_secs_f64() / 1e9);
    Ok(())
}

fn one(kind: u8, address: &str, bytes: u64, seed: u64) -> io::Result<()> {
    let mut stream = connect(address, kind, bytes, seed)?;
    let mut writer = stream.try_clone()?;
    let sender = std::thread::spawn(move || {
        let digest = if kind & UP != 0 { send(&mut writer, bytes, seed)? } else { 0 };
        writer.shutdown(Shutdown::Write)?;
        Ok::<_, io::Error>(digest)
    });
    if kind & DOWN != 0 {
        let (_, got) = receive(&mut stream, Some(bytes))?;
        check("down", got, read_word(&mut stream)?)?;
    }
    let sent = sender.join().map_err(|_| bad("the sender panicked"))??;
    let (count, digest) = (read_word(&mut stream)?, read_word(&mut stream)?);
    if kind & UP != 0 {
        check("up, bytes", count, bytes)?;
        check("up", digest, sent)?;
    }
    match stream.read(&mut [0])? {
        0 => Ok(()),
        _ => Err(bad("bytes after the end")),
    }
}

/// Makes round trips one after another.
fn echo(address: &str, bytes: u64, rounds: u64) -> io::Result<()> {
    let mut stream = connect(address, ECHO, bytes, 0)?;
    let mut content = Content::new(7);
    let (mut sent, mut got) = (vec![0; bytes as usize], vec![0; bytes as usize]);
    let mut micros = Vec::new();
    for _ in 0..rounds {
        content.fill(&mut sent);
        let begun = Instant::now();
        stream.write_all(&sent)?;
        stream.read_exact(&mut got)?;
        micros.push(begun.elapsed().as_secs_f64() * 1e6);
        if sent != got {
            return Err(bad("an echo differs"));
        }
    }
    micros.sort_by(f64::total_cmp);
    let at = |share: f64| micros.get(((micros.len() as f64) * share) as usize).copied().unwrap_or(f64::NAN);
    println!("{:.1} {:.1}", at(0.5), at(0.99));
    Ok(())
}

fn connect(address: &str, kind: u8, bytes: u64, seed: u64) -> io::Result<TcpStream> {
    let mut stream = TcpStream::connect(address)?;
    prepare(&stream)?;
    let mut head = [kind; 17];
    head[1..9].copy_from_slice(&bytes.to_le_bytes());
    head[9..].copy_from_slice(&seed.to_le_bytes());
    stream.write_all(&head)?;
    Ok(stream)
}

fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))
}

/// Sends `bytes` of the seed's content. Returns their digest.
fn send(stream: &mut TcpStream, mut bytes: u64, seed: u64) -> io::Result<u64> {
    let (mut content, mut digest) = (Content::new(seed), Xxh3::new());
    let mut piece = vec![0; PIECE];
    content.fill(&mut piece);
    while bytes > 0 {
        let count = bytes.min(PIECE as u64) as usize;
        content.stamp(&mut piece);
        digest.update(&piece[..count]);
        stream.write_all(&piece[..count])?;
        bytes -= count as u64;
    }
    Ok(digest.digest())
}

/// Receives `bytes`, or everything until the end. Returns the number of bytes and their digest.
fn receive(stream: &mut TcpStream, bytes: Option<u64>) -> io::Result<(u64, u64)> {
    let (mut count, mut digest) = (0, Xxh3::new());
    let mut piece = vec![0; PIECE];
    while bytes.is_none_or(|bytes| count < bytes) {
        let room = bytes.map_or(PIECE, |bytes| (bytes - count).min(PIECE as u64) as usize);
        match stream.read(&mut piece[..room])? {
            0 if bytes.is_none() => break,
            0 => return Err(bad("the stream ended early")),
            got => {
                digest.update(&piece[..got]);
                count += got as u64;
            }
        }
    }
    Ok((count, digest.digest()))
}

/// Random bytes, with a counter in each page.
struct Content {
    random: fastrand::Rng,
    page: u64,
}

impl Content {
    fn new(seed: u64) -> Self {
        Self { random: fastrand::Rng::with_seed(seed), page: seed }
    }

    fn fill(&mut self, bytes: &mut [u8]) {
        self.random.fill(bytes);
    }

    /// Writes the next count into every page, so that all pages differ.
    fn stamp(&mut self, bytes: &mut [u8]) {
        for page in bytes.chunks_exact_mut(4096) {
            self.page = self.page.wrapping_add(1);
            page[..8].copy_from_slice(&self.page.to_le_bytes());
        }
    }
}

fn check(what: &str, got: u64, sent: u64) -> io::Result<()> {
    match got == sent {
        true => Ok(()),
        false => Err(bad(&format!("{what}: {got:x} arrived, {sent:x} was sent"))),
    }
}

fn read_word(stream: &mut TcpStream) -> io::Result<u64> {
    let mut bytes = [0; 8];
    stream.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

fn word(bytes: &[u8]) -> u64 {
    bytes.iter().take(8).rev().fold(0, |word, byte| word << 8 | u64::from(*byte))
}

fn number(text: &str) -> io::Result<u64> {
    text.parse().map_err(|_| bad(&format!("{text:?} is not a number")))
}

fn bad(what: &str) -> io::Error {
    io::Error::other(what.to_owned())
}
