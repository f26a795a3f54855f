//! What the scheduler costs beside the step it plans, and how well it keeps the KV cache filled: alone, where it is
//! served thousands of requests in a second, and in the engine on SmolLM2.
//!
//! Lengths are drawn from distributions with the means of two collections of real requests (see
//! `octavo_benches::lengths`). A request may generate 1024 tokens and ends at its drawn length, which the scheduler does
//! not know before. Figures of a saturated run are over the steps in which a request waited.
//!
//! `cargo bench --bench scheduler -- trace` runs one part: `decoding`, `trace`, `saturation`, `prefix`,
//! `choices` or `beams`.

mod alone;
mod served;
mod table;
mod usage;
mod workload;

use std::time::Duration;

use octavo_benches::{lengths::Lengths, series::Series};
use octavo_engine::EngineConfig;
use octavo_sched::{GroupConfig, PrefixCaching, SchedulerConfig, VictimOrder};

use alone::Alone;
use served::Served;
use usage::Usage;
use workload::{Beams, END, Workload};

const BLOCK_SIZE: usize = 16;
/// Most tokens of a step.
const STEP_TOKENS: usize = 512;
/// Longest prompt and longest output together.
const LONGEST_SEQUENCE: usize = 2048;

fn main() {
    let parts: [(&str, fn()); 6] = [
        ("decoding", decoding),
        ("trace", trace),
        ("saturation", saturation),
        ("prefix", prefix),
        ("choices", choices),
        ("beams", beams),
    ];
    let wanted: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    println!("blocks of {BLOCK_SIZE} tokens, up to {STEP_TOKENS} tokens a step; medians [least to most]");
    for (name, part) in parts {
        if wanted.is_empty() || wanted.iter().any(|wanted| wanted == name) {
            println!("\n{name}");
            part();
        }
    }
}

/// One decode step of 256 sequences: the scheduler's share of it.
fn decoding() {
    const SEQUENCES: usize = 256;
    const TIMED: usize = 1000;
    const TIMED_WITH_MODEL: usize = 9;
    // Lengths that differ, so that in each step some of the sequences come to the end of a block.
    let prompts = || (0..SEQUENCES).map(|index| 9 + index % BLOCK_SIZE);
    // Until the last prompt is computed the first ones decode.
    let most = |timed: usize| timed + 64;
    let size = |timed| Size { seats: SEQUENCES, blocks: SEQUENCES * (2 + most(timed).div_ceil(BLOCK_SIZE)) };

    let workload = Workload::of_prompts(prompts(), most(TIMED));
    let (mut alone, _) = Alone::new(&workload, size(TIMED).scheduler(PrefixCaching::On));
    while alone.stats().waiting > 0 {
        alone.step();
    }
    alone.step();
    let times: Vec<_> = (0..TIMED).map_while(|_| alone.step()).collect();
    let micros =
        |time: fn(&alone::Spent) -> Duration| Series::of_many(times.iter().map(|spent| seconds(time(spent))).collect());
    let both = micros(|spent| spent.schedule + spent.commit);
    let (schedule, commit) = (micros(|spent| spent.schedule), micros(|spent| spent.commit));
    println!("  schedule           {} us", schedule.scaled(1e6));
    println!("  commit             {} us", commit.scaled(1e6));
    println!(
        "  both               {} us, limit 50; {SEQUENCES} sequences, {TIMED} steps, 1% cut off at either end",
        both.scaled(1e6)
    );

    let workload = Workload::of_prompts(prompts(), most(TIMED_WITH_MODEL));
    let mut served = Served::new(workload, size(TIMED_WITH_MODEL).engine());
    while served.stats().waiting > 0 {
        served.step();
    }
    served.step();
    let step = Series::of((0..TIMED_WITH_MODEL).map_while(|_| served.step()).map(seconds).collect());
    println!("  the engine's step  {} ms, {:.1} steps/s", step.scaled(1e3), 1.0 / step.median);
    println!("  the scheduler is {:.3}% of it", 100.0 * both.median / step.median);
}

/// Thousands of requests through the scheduler alone.
fn trace() {
    const REQUESTS: usize = 10_000;
    let workload = Workload::draw(Lengths::sharegpt(), 1, REQUESTS);
    let config = Size { seats: 256, blocks: 4096 };
    let mut totals = vec![];
    let mut usage = Usage::default();
    // The first turn warms up.
    for turn in 0..4 {
        let (mut alone, adding) = Alone::new(&workload, config.scheduler(PrefixCaching::On));
        let (spent, found) = alone.finish(16);
        if turn > 0 {
            totals.push(seconds(adding + spent.schedule + spent.commit));
        }
        usage = found;
    }
    let total = Series::of(totals);
    println!("  {REQUESTS} requests, {} seats, {} slots, lengths like ShareGPT's", config.seats, config.slots());
    println!("  add, schedule, commit {} ms in all, limit 1000", total.scaled(1e3));
    let steps = usage.last().steps;
    println!("  {steps} steps, {:.0} steps/s; {:.1} running", steps as f64 / total.median, usage.running());
    print_usage(&usage);
}

/// The engine with more requests than its KV cache holds.
fn saturation() {
    const FINISHED: u64 = 160;
    let config = Size { seats: 64, blocks: 1024 };
    println!("  {} seats, {} slots, lengths like ShareGPT's", config.seats, config.slots());
    let workload = Workload::draw(Lengths::sharegpt(), 1, 2 * FINISHED as usize + config.seats);
    let start = std::time::Instant::now();
    let usage = Served::new(workload, config.engine()).finish(FINISHED);
    print_served(&usage, start.elapsed());
    print_usage(&usage);

    let workload = Workload::draw(Lengths::sharegpt(), 1, 4000);
    let (mut alone, _) = Alone::new(&workload, config.scheduler(PrefixCaching::On));
    let (_, usage) = alone.finish(1);
    println!("  the scheduler alone: {} requests, {:.1} running", usage.last().admitted, usage.running());
    print_usage(&usage);
}

/// What it costs to look for prompts that are not in the prefix cache, and to put them there.
fn prefix() {
    const PROMPTS: usize = 400;
    const TURNS: usize = 9;
    // Each prompt fills a step and is thrown out by later ones.
    let workload = |count| Workload::of_prompts((0..count).map(|_| STEP_TOKENS), 1);
    let config = Size { seats: 64, blocks: 1024 };
    let prompts = workload(PROMPTS);
    let mut costs = [vec![], vec![], vec![]];
    for turn in 0..=TURNS {
        let [on, off] = [PrefixCaching::On, PrefixCaching::Off].map(|caching| {
            let (mut alone, _) = Alone::new(&prompts, config.scheduler(caching));
            let (spent, usage) = alone.finish(PROMPTS);
            [spent.schedule, spent.commit, spent.schedule + spent.commit]
                .map(|time| seconds(time) / usage.last().steps as f64)
        });
        if turn > 0 {
            (0..3).for_each(|part| costs[part].push(on[part] - off[part]));
        }
    }
    let [lookup, publication, both] = costs.map(Series::of);
    let mut served = Served::new(workload(TURNS + 1), config.engine());
    served.step();
    let step = Series::of((0..TURNS).map_while(|_| served.step()).map(seconds).collect());
    println!("  prompts of {STEP_TOKENS} tokens, no two alike: with the cache less without, a step");
    println!("  lookup in schedule    {} us", lookup.scaled(1e6));
    println!("  publication in commit {} us", publication.scaled(1e6));
    println!("  the engine's step     {} ms, {:.1} steps/s", step.scaled(1e3), 1.0 / step.median);
    let share = |cost: Series| 100.0 * cost.median / step.median;
    println!("  lookup {:.4}% of it, limit 0.3; both {:.4}%", share(lookup), share(both));
}

/// Several continuations of each prompt: the blocks that sharing saves.
fn choices() {
    const CHOICES: usize = 4;
    const FINISHED: u64 = 400;
    println!("  {CHOICES} continuations each, lengths like Alpaca's");
    let workload = Workload::draw(Lengths::alpaca(), CHOICES, 4000);
    let config = Size { seats: 256, blocks: 4096 };
    let (mut alone, _) = Alone::new(&workload, config.scheduler(PrefixCaching::On));
    let (_, usage) = alone.finish(1);
    println!("  the scheduler alone: {} requests, {:.1} sequences running", usage.last().admitted, usage.running());
    print_saved(&usage, 6);

    let config = Size { seats: 64, blocks: 1024 };
    let workload = Workload::draw(Lengths::alpaca(), CHOICES, FINISHED as usize);
    let start = std::time::Instant::now();
    let usage = Served::new(workload, config.engine()).finish(FINISHED);
    print_served(&usage, start.elapsed());
    print_saved(&usage, 6);
}

/// Beam searches: the blocks that sharing saves. Kwon et al. (SOSP'23, figure 15) have 37.6% to 55.2%.
fn beams() {
    const FINISHED: u64 = 240;
    for width in [4, 6] {
        println!("  {width} beams each, lengths like Alpaca's");
        let config = Size { seats: 256, blocks: 4096 };
        // The likeliest of two thousand tokens then has about a third, or a fiftieth.
        for (model, deviation) in [("sure", 2.8), ("unsure", 1.0)] {
            let workload = Workload::draw_searches(Lengths::alpaca(), Beams { width, deviation }, 1000);
            let (mut alone, _) = Alone::new(&workload, config.scheduler(PrefixCaching::On));
            let (spent, usage) = alone.finish(1);
            let micros = 1e6 * seconds(spent.schedule + spent.commit) / usage.last().steps as f64;
            println!(
                "  the scheduler alone, with a model {model} of what follows: {:.1} sequences running, {micros:.0} us a step",
                usage.running()
            );
            print_saved(&usage, 37);
        }

        let config = Size { seats: 64, blocks: 1024 };
        let workload = Workload::draw_searches(Lengths::alpaca(), Beams { width, deviation: 0.0 }, FINISHED as usize);
        let start = std::time::Instant::now();
        let usage = Served::new(workload, config.engine()).finish(FINISHED);
        print_served(&usage, start.elapsed());
        print_saved(&usage, 37);
    }
}

fn print_served(usage: &Usage, time: Duration) {
    let stats = usage.last();
    println!(
        "  the engine on SmolLM2: {} outputs ended in {:.0} s, {:.1} running, {:.1} steps/s, {:.0} tokens/s in and out",
        stats.finished.total(),
        seconds(time),
        usage.running(),
        stats.steps as f64 / seconds(time),
        stats.tokens_scheduled as f64 / seconds(time),
    );
}

fn print_usage(usage: &Usage) {
    println!(
        "    slots used {:.1}% of those in allocated blocks, at least 95 expected; {:.1}% of the pool is allocated",
        100.0 * usage.slots_used(),
        100.0 * usage.pool_owned(),
    );
    let preemptions = usage.last().preemptions;
    println!("    preemptions {:.3} a request ({preemptions}), limit 0.1", usage.preemptions_a_request());
}

fn print_saved(usage: &Usage, least: u32) {
    println!(
        "    blocks saved {:.1}% of all tables' lengths, at least {least} expected; {} blocks copied, {} preemptions",
        100.0 * usage.blocks_saved(),
        usage.last().blocks_copied,
        usage.last().preemptions,
    );
}

fn seconds(time: Duration) -> f64 {
    time.as_secs_f64()
}

/// Sizes of one run.
#[derive(Debug, Clone, Copy)]
struct Size {
    /// Sequences that run at once.
    seats: usize,
    /// Blocks of the KV cache.
    blocks: usize,
}

impl Size {
    fn slots(self) -> usize {
        self.blocks * BLOCK_SIZE
    }

    fn scheduler(self, prefix_cache: PrefixCaching) -> SchedulerConfig {
        SchedulerConfig {
            block_size: BLOCK_SIZE,
            groups: vec![GroupConfig { num_blocks: self.blocks, window: None }],
            max_model_len: LONGEST_SEQUENCE,
            max_num_seqs: self.seats,
            max_num_batched_tokens: STEP_TOKENS,
            eos_token_ids: vec![END],
            prefix_cache,
            victims: VictimOrder::default(),
        }
    }

    fn engine(self) -> EngineConfig {
        EngineConfig {
            block_size: BLOCK_SIZE,
            num_blocks: vec![self.blocks],
            max_model_len: LONGEST_SEQUENCE,
            max_num_seqs: self.seats,
            max_num_batched_tokens: STEP_TOKENS,
            eos_token_ids: vec![END],
            seed: 0,
            mask_threads: 1,
            prefix_cache: PrefixCaching::On,
        }
    }
}
