//! Loads a proxy between a TCP client and a TCP server with streams, and checks every byte. `benches/bridge`
//! measures proxies with it.
//!
//! A receiver makes the sender's content anew, from its seed, and compares every byte.
#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program of its own")]

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use clap::{Args, Parser};
use tonic_rdma_commands::statistics::quantile;
use tonic_rdma_commands::{Failure, status};

/// Bytes of one write, and the most of one read.
const CHUNK: usize = 256 * 1024;
/// Time that an end waits for a byte. A peer that takes longer hangs.
const TIMEOUT: Duration = Duration::from_secs(60);

const UP: u8 = 1;
const DOWN: u8 = 2;
const ECHO: u8 = 4;

/// Loads a proxy between a TCP client and a TCP server with streams, and checks every byte.
#[derive(Debug, Parser)]
enum Job {
    /// Print the port, and serve until killed
    Serve { address: String },
    /// Send to the server, and print GB/s over all connections
    Up(Load),
    /// Receive from the server, and print GB/s over all connections
    Down(Load),
    /// Send and receive at once, and print GB/s over all connections and directions
    Both(Load),
    /// Make round trips, and print p50 and p99, in µs
    Echo { address: String, bytes: u64, rounds: u64 },
}

#[derive(Debug, Args)]
struct Load {
    address: String,
    bytes: u64,
    #[arg(default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    connections: u64,
    #[arg(default_value_t = 1)]
    seed: u64,
}

fn main() -> ExitCode {
    let done = match Job::parse() {
        Job::Serve { address } => serve(&address),
        Job::Up(load) => load.run(UP),
        Job::Down(load) => load.run(DOWN),
        Job::Both(load) => load.run(UP | DOWN),
        Job::Echo { address, bytes, rounds } => echo(&address, bytes, rounds),
    };
    status("bridge-load", done.map_err(Failure::from))
}

/// Answers every connection in its own thread.
fn serve(address: &str) -> io::Result<()> {
    let listener = TcpListener::bind(address)?;
    println!("{}", listener.local_addr()?.port());
    for stream in listener.incoming() {
        let stream = stream?;
        thread::spawn(move || {
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
        // A proxy that only probes the server sends nothing.
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
        read => read?,
    }
    let (kind, bytes, seed) = (head[0], word(&head[1..]), word(&head[9..]));
    if kind == ECHO {
        return io::copy(&mut stream.try_clone()?, &mut stream).map(drop);
    }
    transfer(&stream, (kind & DOWN != 0).then_some(!seed), (kind & UP != 0).then_some(seed), bytes)?;
    expect_end(&mut stream)?;
    // The client knows by this byte that all of its bytes were right.
    stream.write_all(&[kind])?;
    stream.shutdown(Shutdown::Write)
}

impl Load {
    /// Runs all connections in parallel, and prints their total throughput.
    fn run(&self, kind: u8) -> io::Result<()> {
        let begun = Instant::now();
        thread::scope(|scope| {
            let run = |index| scope.spawn(move || self.one(kind, self.seed.wrapping_add(index)));
            let running: Vec<_> = (0..self.connections).map(run).collect();
            running.into_iter().try_for_each(|one| one.join().map_err(|_| bad("a connection panicked"))?)
        })?;
        let moved = self.bytes * self.connections * u64::from(kind.count_ones());
        println!("{:.3}", moved as f64 / begun.elapsed().as_secs_f64() / 1e9);
        Ok(())
    }

    fn one(&self, kind: u8, seed: u64) -> io::Result<()> {
        let mut stream = connect(&self.address, kind, self.bytes, seed)?;
        let (sends, receives) = ((kind & UP != 0).then_some(seed), (kind & DOWN != 0).then_some(!seed));
        transfer(&stream, sends, receives, self.bytes)?;
        stream.shutdown(Shutdown::Write)?;
        stream.read_exact(&mut [0])?;
        expect_end(&mut stream)
    }
}

/// Makes round trips one after another.
fn echo(address: &str, bytes: u64, rounds: u64) -> io::Result<()> {
    let mut stream = connect(address, ECHO, bytes, 0)?;
    let mut random = fastrand::Rng::with_seed(7);
    let (mut sent, mut got) = (vec![0; bytes as usize], vec![0; bytes as usize]);
    let mut micros = Vec::new();
    for _ in 0..rounds {
        random.fill(&mut sent);
        let begun = Instant::now();
        stream.write_all(&sent)?;
        stream.read_exact(&mut got)?;
        micros.push(begun.elapsed().as_secs_f64() * 1e6);
        if sent != got {
            return Err(bad("an echo differs"));
        }
    }
    let at = |share: f64| quantile(micros.iter().copied(), share);
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
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))
}

/// Sends and receives `bytes` of the content of these seeds at the same time.
fn transfer(stream: &TcpStream, sends: Option<u64>, receives: Option<u64>, bytes: u64) -> io::Result<()> {
    thread::scope(|scope| {
        let sending = scope.spawn(|| sends.map_or(Ok(()), |seed| send(stream, bytes, seed)));
        let received = receives.map_or(Ok(()), |seed| receive(stream, bytes, seed));
        sending.join().map_err(|_| bad("the sender panicked"))?.and(received)
    })
}

fn send(mut stream: &TcpStream, mut bytes: u64, seed: u64) -> io::Result<()> {
    let mut content = Content::new(seed);
    while bytes > 0 {
        let count = bytes.min(CHUNK as u64) as usize;
        stream.write_all(&content.next()[..count])?;
        bytes -= count as u64;
    }
    Ok(())
}

fn receive(mut stream: &TcpStream, mut bytes: u64, seed: u64) -> io::Result<()> {
    let (mut content, mut chunk) = (Content::new(seed), vec![0; CHUNK]);
    while bytes > 0 {
        let chunk = &mut chunk[..bytes.min(CHUNK as u64) as usize];
        stream.read_exact(chunk)?;
        if *chunk != content.next()[..chunk.len()] {
            return Err(bad("other bytes arrived than were sent"));
        }
        bytes -= chunk.len() as u64;
    }
    Ok(())
}

/// Random bytes, with a counter in each page, so that all pages differ.
struct Content {
    chunk: Vec<u8>,
    page: u64,
}

impl Content {
    fn new(seed: u64) -> Self {
        let mut chunk = vec![0; CHUNK];
        fastrand::Rng::with_seed(seed).fill(&mut chunk);
        Self { chunk, page: seed }
    }

    /// Returns the next chunk.
    fn next(&mut self) -> &[u8] {
        for page in self.chunk.chunks_exact_mut(4096) {
            self.page = self.page.wrapping_add(1);
            page[..8].copy_from_slice(&self.page.to_le_bytes());
        }
        &self.chunk
    }
}

fn expect_end(stream: &mut TcpStream) -> io::Result<()> {
    match stream.read(&mut [0])? {
        0 => Ok(()),
        _ => Err(bad("bytes after the end")),
    }
}

fn word(bytes: &[u8]) -> u64 {
    bytes.iter().take(8).rev().fold(0, |word, byte| word << 8 | u64::from(*byte))
}

fn bad(what: &str) -> io::Error {
    io::Error::other(what.to_owned())
}
