"""The pocket stories' plots: each is a want, an obstacle, help, a resolution and a moral, with its questions.

A plot is data. Every step lists sentences of which one is told; `{slots}` are filled by `stories.py`:
`{hero} {he} {him} {his}`, the same with `f_` for `{friend}`, `{thing}` ("red ball"), `{food} {foods}`,
`{at_place} {place}`, `{spot}`. A capital first letter in a slot's name gives the capital form.
"""

from dataclasses import dataclass

from .words import listed


@dataclass(frozen=True, slots=True)
class Plot:
    """`theme` is what a user asks for ("a story about sharing"); `questions` come with their answers."""

    theme: str
    steps: tuple[tuple[str, ...], ...]
    morals: tuple[str, ...]
    questions: tuple[tuple[str, str], ...]
    has_thing: bool = True


LOST = Plot(
    theme="something lost",
    steps=(
        (
            "{Hero} had {a_thing} that {he} loved very much.",
            "{He} took {his} {thing} along, as {he} always did.",
            "{Hero} wanted to play with {his} {thing}.",
        ),
        (
            "But after a while, the {thing} was gone.",
            "Then {he} looked down and saw that the {thing} was missing.",
            "But when {he} ran and jumped, {he} lost the {thing}.",
        ),
        (
            "{Hero} looked here and there, but {he} could not find it.",
            "{He} searched for a long time and found nothing.",
            "{Hero} felt so sad that {he} began to cry.",
            '"Oh no!" said {hero}. "Where is my {thing}?"',
        ),
        (
            '{Friend} saw {him} and asked, "What is wrong?"',
            'Just then, {friend} came by. "Do not worry," {f_he} said. "I will help you look."',
            '{Friend} heard {him} and said, "Let us look together."',
        ),
        (
            "They looked everywhere, and at last {friend} found the {thing} {spot}.",
            "Together they looked and looked. The {thing} was {spot}!",
            "{Friend} had good eyes. Soon {f_he} saw the {thing} {spot}.",
        ),
        (
            '"Thank you!" said {hero}, and {he} gave {friend} a big hug.',
            "{Hero} was so happy that {he} danced with {friend}.",
            "{Hero} laughed, and the two of them played with the {thing} until the sun went down.",
        ),
    ),
    morals=(
        "From that day on, {hero} took good care of {his} {thing}.",
        "{Hero} learned that a friend makes every search easier.",
        "And {hero} and {friend} were friends from that day on.",
    ),
    questions=(
        ("What did {hero} lose?", "{Hero} lost {his} {thing}."),
        ("Who helped {hero}?", "{Friend} helped {hero}."),
        ("Where was the {thing}?", "The {thing} was {spot}."),
        ("How did {hero} feel at the end?", "{Hero} was happy."),
    ),
)

STUCK = Plot(
    theme="a tall tree",
    steps=(
        (
            "{He} played with {his} new {thing} and threw it up high.",
            "{Hero} had {a_thing}, and {he} threw it into the air again and again.",
            "{Hero} was playing with {a_thing} when a strong wind came.",
        ),
        (
            "Up, up it went, and then it was stuck in a tall tree.",
            "Then the {thing} flew into a tall tree and did not come down.",
            "Oh no! The {thing} was stuck at the top of a tree.",
        ),
        (
            "{Hero} jumped as high as {he} could, but {he} could not reach it.",
            "{He} tried to climb the tree, but {he} was too small.",
            "{He} shook the tree, but the {thing} did not move.",
        ),
        (
            '{Friend} was walking by. "I can help you," {f_he} said.',
            "{Friend} saw that {hero} was sad and came to help.",
            '{Hero} called {friend} and asked, "Can you help me, please?"',
        ),
        (
            "{Friend} took a long stick and pushed the {thing} out of the tree.",
            "{Friend} let {hero} stand on {f_his} back, and {hero} reached the {thing}.",
            "{Friend} climbed up slowly, step by step, and brought the {thing} down.",
        ),
        (
            '"We did it!" said {hero} with a big smile.',
            "{Hero} clapped and thanked {friend} many times.",
            "Then they played together, far away from the tree.",
        ),
    ),
    morals=(
        "{Hero} learned that it is good to ask for help.",
        "Together, even a tall tree is not so tall.",
        "That night, {hero} told everyone about {his} good friend.",
    ),
    questions=(
        ("What was stuck in the tree?", "The {thing} was stuck in the tree."),
        ("Where was the {thing}?", "The {thing} was stuck in a tall tree."),
        ("Who helped {hero}?", "{Friend} helped {hero}."),
        ("Where did {hero} play?", "{Hero} played {at_place}."),
    ),
)

HONEST = Plot(
    theme="being honest",
    steps=(
        (
            "There {he} found {a_thing} {spot}.",
            "{He} saw something {spot}. It was {a_thing}!",
            "Suddenly, {hero} found {a_thing} {spot}.",
        ),
        (
            '"How pretty!" {he} said. "I want to keep it."',
            "{Hero} liked it very much and wanted to take it home.",
            "It was so nice that {hero} put it in {his} bag.",
        ),
        (
            "Then {he} met {friend}, who was crying.",
            "But on the way home, {he} saw {friend}, who looked very sad.",
            "Soon {friend} came along, looking at the ground with sad eyes.",
        ),
        (
            '"I lost my {thing}," said {friend}.',
            '"My {thing} is gone," said {friend}, "and I cannot find it."',
        ),
        (
            "{Hero} thought for a moment. It was hard, but {he} knew what was right.",
            "{Hero} wanted to keep it, but {he} did not want {friend} to be sad.",
            "{Hero} felt bad, because {he} knew whose {thing} it was.",
        ),
        (
            '"Here it is," {he} said, and {he} gave the {thing} back.',
            "So {hero} gave the {thing} to {friend} and told {f_him} where it had been.",
        ),
        (
            "{Friend} was so glad that {f_he} shared {f_his} {foods} with {hero}.",
            '"Thank you for being honest!" said {friend}, and they played together all day.',
            "{Friend} smiled and gave {hero} a sweet {food}.",
        ),
    ),
    morals=(
        "{Hero} felt warm inside, because telling the truth is always best.",
        "{Hero} had lost a {noun}, but {he} had found a friend.",
        "From then on, {hero} was always honest.",
    ),
    questions=(
        ("What did {hero} find?", "{Hero} found {a_thing}."),
        ("Where did {hero} find the {thing}?", "{Hero} found the {thing} {spot}."),
        ("Who had lost the {thing}?", "{Friend} had lost the {thing}."),
        ("What did {hero} do with the {thing}?", "{Hero} gave the {thing} back to {friend}."),
    ),
)

SHARING = Plot(
    theme="sharing",
    steps=(
        (
            "{He} had a bag with {count} {foods} for lunch.",
            "{Hero} carried {count} sweet {foods} in {his} bag.",
            "{His} mother had given {him} {count} {foods} to eat.",
        ),
        (
            "{He} was hungry and sat down to eat.",
            "{Hero} sat down in the sun and opened {his} bag.",
        ),
        (
            "Then {friend} came by. {F_he} had nothing to eat at all.",
            "But {he} saw {friend}, who looked tired and hungry.",
            '"I am so hungry," said {friend}, who had walked all day.',
        ),
        (
            "{Hero} looked at {his} {foods}. There were not many.",
            "At first, {hero} wanted to eat all the {foods} alone.",
        ),
        (
            '"Sit with me," said {hero}, and {he} gave half of the {foods} to {friend}.',
            "Then {he} smiled and shared the {foods} with {friend}.",
        ),
        (
            "They ate and talked and laughed.",
            "The {foods} had never tasted so good.",
            "{Friend} ate slowly and smiled at every bite.",
        ),
        (
            "On the way home, {hero} fell into a hole, and {friend} pulled {him} out.",
            "Later it began to rain, and {friend} gave {hero} a dry place to stay.",
            "The next day, {friend} came back with a basket full of food for {hero}.",
        ),
    ),
    morals=(
        "{Hero} was glad that {he} had been kind.",
        "When you share, you have less food but more friends.",
        "{Hero} learned that kindness always comes back.",
    ),
    questions=(
        ("What did {hero} have in {his} bag?", "{Hero} had {count} {foods}."),
        ("What did {hero} share?", "{Hero} shared {his} {foods}."),
        ("Who was hungry?", "{Friend} was hungry."),
        ("Who did {hero} share with?", "{Hero} shared with {friend}."),
    ),
    has_thing=False,
)

FEAR = Plot(
    theme="being brave",
    steps=(
        (
            "{Hero} was afraid of {fear}.",
            "There was only one problem: {hero} was scared of {fear}.",
        ),
        (
            "The others laughed and played, but {hero} stayed behind.",
            "Every time {he} thought of {fear}, {his} legs began to shake.",
            "{He} wanted to be brave, but {he} did not know how.",
        ),
        (
            '{Friend} sat down next to {him}. "I was afraid too, once," {f_he} said.',
            '{Friend} saw this and said, "Take my hand. We will go together."',
            '"You do not have to do it alone," said {friend}.',
        ),
        (
            "{Hero} took a deep breath and made one small step.",
            "{Hero} closed {his} eyes and counted to three.",
            "So {he} held on to {friend} and tried.",
        ),
        (
            "Nothing bad happened.",
            "It was not so bad at all.",
            "{His} heart beat fast, but {he} did not run away.",
        ),
        (
            '"I did it!" shouted {hero}.',
            "{Hero} took another step, and another, and then {he} laughed.",
            '"Look at me!" said {hero}. "I am brave!"',
        ),
    ),
    morals=(
        "{Hero} was not afraid of {fear} any more.",
        "That day, {hero} learned that being brave means to try even when you are scared.",
        "{Friend} was very proud of {him}.",
    ),
    questions=(
        ("What was {hero} afraid of?", "{Hero} was afraid of {fear}."),
        ("Who helped {hero}?", "{Friend} helped {hero}."),
        ("Was {hero} brave at the end?", "Yes, {hero} was brave."),
    ),
    has_thing=False,
)

BROKEN = Plot(
    theme="telling the truth",
    steps=(
        (
            "{Friend} had {a_thing} and let {hero} hold it.",
            '"You may play with my {thing}," said {friend}, "but please be careful."',
            "{Friend} showed {hero} {a_thing}. It was very pretty.",
        ),
        (
            "{Hero} ran too fast and fell, and the {thing} broke.",
            "{Hero} was not careful. The {thing} fell down and broke.",
            "Crash! The {thing} fell on a stone, and now it was broken.",
        ),
        (
            "{Hero} was scared and wanted to hide the {thing} {spot}.",
            "{He} hid the {thing} {spot} and hoped that nobody would see.",
        ),
        (
            "But {his} tummy felt bad, and {he} could not play.",
            "But a secret is heavy, and {hero} could not stop thinking of it.",
        ),
        (
            'At last, {he} went to {friend}. "I broke your {thing}," {he} said. "I am sorry."',
            "So {hero} told {friend} the truth and said that {he} was sorry.",
        ),
        (
            '{Friend} was sad at first. Then {f_he} said, "Thank you for telling me."',
            "{Friend} was not angry. {F_he} hugged {hero} and smiled.",
        ),
        (
            "They took some glue and fixed the {thing} together.",
            "Together they fixed it, and it looked almost like new.",
        ),
    ),
    morals=(
        "{Hero} felt light and happy again, because {he} had told the truth.",
        "{Hero} learned that it is better to say sorry than to hide.",
    ),
    questions=(
        ("What did {hero} break?", "{Hero} broke the {thing}."),
        ("Whose {thing} was it?", "It was the {thing} of {friend}."),
        ("Where did {hero} hide the {thing}?", "{Hero} hid the {thing} {spot}."),
    ),
)

SEED = Plot(
    theme="waiting",
    steps=(
        (
            "{He} had a tiny seed and wanted it to grow into a big {plant}.",
            "{Hero} found a seed {spot} and wanted to grow {a_plant}.",
        ),
        (
            "{He} dug a hole and put the seed into the ground.",
            "So {he} put the seed into the soft earth and waited.",
        ),
        (
            "One day passed, and then another, but nothing came up.",
            "{Hero} looked every morning, but there was only brown earth.",
            '"Why does it not grow?" asked {hero}. {He} was close to tears.',
        ),
        (
            '{Friend} said, "A seed needs water and sun and time."',
            '"Give it water every day," said {friend}, "and do not give up."',
        ),
        (
            "So {hero} brought water every morning and sang to the seed.",
            "{Hero} and {friend} gave it water every day.",
        ),
        (
            "One sunny morning, there was a small green leaf!",
            "Then, after the rain, a little green plant came out of the ground.",
        ),
        (
            "It grew and grew, until it was the most beautiful {plant} {at_place}.",
            "Soon it was a big {plant}, and all the bees came to visit.",
        ),
    ),
    morals=(
        "{Hero} learned that good things take time.",
        '"It was worth the wait," said {hero}.',
        "{Hero} gave a new seed to {friend}, and they started again.",
    ),
    questions=(
        ("What did {hero} want to grow?", "{Hero} wanted to grow {a_plant}."),
        ("What does a seed need?", "A seed needs water and sun and time."),
        ("Who told {hero} about the water?", "{Friend} told {hero}."),
    ),
    has_thing=False,
)

LEARN = Plot(
    theme="learning",
    steps=(
        (
            "More than anything, {hero} wanted to learn how to {skill}.",
            "{Hero} saw the others {skill}, and {he} wanted to {skill} too.",
            '"I wish I could {skill}," said {hero}.',
        ),
        (
            "{He} tried once, but it went wrong, and everybody laughed.",
            "{He} tried and tried, but {he} could not do it.",
            "The first time, {he} fell right into the mud.",
        ),
        (
            '"I will never learn it," {he} said and sat down {spot}.',
            "{Hero} was sad and wanted to go home.",
        ),
        (
            '{Friend} came and sat beside {him}. "I needed a long time too," {f_he} said.',
            '"Do not give up," said {friend}. "I will show you how."',
        ),
        (
            "Every day, {friend} and {hero} practiced together.",
            "They practiced in the morning and in the evening, in sun and in rain.",
        ),
        (
            "Little by little, it went better.",
            "Then, one day, it happened.",
            "After many days, {hero} tried once more.",
        ),
        (
            '"Look, I can {skill}!" shouted {hero}.',
            "Now {hero} could {skill}, and everybody clapped.",
        ),
    ),
    morals=(
        "{Hero} learned that you should never give up.",
        "And {friend} was the one who clapped the most.",
        "Since that day, {hero} helps everyone who wants to learn something new.",
    ),
    questions=(
        ("What did {hero} want to learn?", "{Hero} wanted to learn how to {skill}."),
        ("Who helped {hero}?", "{Friend} helped {hero}."),
        ("Could {hero} {skill} at the end?", "Yes, at the end {hero} could {skill}."),
    ),
    has_thing=False,
)

RAIN = Plot(
    theme="the rain",
    steps=(
        (
            "{He} wanted to have a picnic with {his} {foods}.",
            "{Hero} had packed some {foods} for a picnic in the sun.",
        ),
        (
            "But dark clouds came, and it began to rain.",
            "Suddenly there was thunder, and the rain fell hard.",
        ),
        (
            '"My picnic!" cried {hero}. {He} was wet and cold.',
            "{Hero} ran to find a dry place, but there was none.",
        ),
        (
            '"Come in here!" called {friend} from {shelter}.',
            "Then {he} saw {shelter}. {Friend} was inside and waved to {him}.",
        ),
        (
            "Inside it was warm and dry.",
            "{Hero} went in and was soon warm again.",
        ),
        (
            "They ate the {foods} and listened to the rain.",
            "{Hero} shared the {foods}, and {friend} told a funny story.",
        ),
        (
            "When the rain stopped, a rainbow stood over {place}.",
            "At last the sun came out again, and they saw a big rainbow.",
        ),
    ),
    morals=(
        '"This was the best picnic ever," said {hero}.',
        "{Hero} learned that even a rainy day can be a good day.",
        "They promised to meet again, in rain or in sun.",
    ),
    questions=(
        ("What did {hero} want to have?", "{Hero} wanted to have a picnic."),
        ("Where did they stay dry?", "They stayed dry in {shelter}."),
        ("What did they eat?", "They ate the {foods}."),
        ("What did they see after the rain?", "They saw a rainbow."),
    ),
    has_thing=False,
)

BABY = Plot(
    theme="helping",
    steps=(
        (
            "There {he} heard a small voice {spot}.",
            "Suddenly, {hero} heard somebody cry {spot}.",
        ),
        (
            '{He} looked and found a baby {baby}. "I cannot find my mother," it said.',
            "It was a baby {baby} that had lost its mother.",
        ),
        (
            '"Do not be afraid," said {hero}. "I will help you."',
            "{Hero} took the baby {baby} in {his} arms and dried its tears.",
        ),
        (
            "They asked the bees and the birds, but nobody had seen the mother.",
            "They walked all over {place}, but they did not find her.",
        ),
        (
            'Then they met {friend}. "I saw a big {baby} on the other side," {f_he} said.',
            "{Friend} knew the way and showed them a path to the other side.",
        ),
        (
            "And there she was! The mother {baby} ran to her baby and kissed it.",
            "Soon they found the mother, who was so happy that she cried.",
        ),
        (
            '"Thank you," said the mother. "You have a good heart."',
            "The mother {baby} gave {hero} some {foods} to say thank you.",
        ),
    ),
    morals=(
        "{Hero} walked home with a big smile.",
        "{Hero} learned that even someone small can be a big help.",
    ),
    questions=(
        ("Who did {hero} find?", "{Hero} found a baby {baby}."),
        ("What had the baby {baby} lost?", "The baby {baby} had lost its mother."),
        ("Who showed them the way?", "{Friend} showed them the way."),
        ("Where did {hero} hear the voice?", "{Hero} heard it {spot}."),
    ),
    has_thing=False,
)

BUILD = Plot(
    theme="working together",
    steps=(
        (
            "{He} wanted to build {a_building}, the best one of all.",
            "{Hero} had a plan: {he} wanted to build {a_building}.",
        ),
        (
            "{He} worked all morning, and it looked very good.",
            "{He} worked hard and did not stop to eat.",
        ),
        (
            "Then a strong wind came and knocked it down.",
            "But when it was almost done, it fell down.",
        ),
        (
            '"All my work is gone!" said {hero}, and {he} kicked a stone.',
            "{Hero} was angry and wanted to stop.",
        ),
        (
            '"Let us build it again," said {friend}, "but this time together."',
            "{Friend} came with strong wood and said that two can do more than one.",
        ),
        (
            "{Hero} made the bottom, and {friend} made the top.",
            "They made thick walls, and they helped each other.",
        ),
        (
            "This time, the wind came back, but the {building} did not fall.",
            "In the evening, the {building} was done, and it was strong.",
        ),
    ),
    morals=(
        "{Hero} learned that work is easier with a friend.",
        "They sat down in front of it and ate {foods} until the stars came out.",
    ),
    questions=(
        ("What did {hero} want to build?", "{Hero} wanted to build {a_building}."),
        ("Who helped {hero}?", "{Friend} helped {hero}."),
        ("Where did {hero} build it?", "{Hero} built it {at_place}."),
    ),
    has_thing=False,
)

GIFT = Plot(
    theme="a birthday",
    steps=(
        (
            "It was the birthday of {friend}, and {hero} wanted to bring a present.",
            "{Hero} remembered that {friend} had a birthday that day.",
        ),
        (
            "But {he} had no money to buy anything.",
            "But {he} did not have a present.",
        ),
        (
            "{He} sat down and thought for a long time.",
            '"What can I do?" {he} asked {himself}.',
        ),
        (
            "Then {he} had an idea. {He} could make something!",
            '"I know!" {he} said. "I will make something myself."',
        ),
        (
            "With wood and paper and paint, {he} made {a_thing}.",
            "{He} worked all day and made {a_thing}.",
        ),
        (
            "{Friend} opened the box, and {f_his} eyes grew big.",
            "In the evening, {he} gave it to {friend}.",
        ),
        (
            '"It is the best present of all," said {friend}, "because you made it."',
            "{Friend} loved the {thing} and hugged {hero}.",
        ),
    ),
    morals=(
        "{Hero} learned that a present from the heart is worth more than gold.",
        "Then they ate {foods} and sang until late.",
    ),
    questions=(
        ("What did {hero} make?", "{Hero} made {a_thing}."),
        ("Whose birthday was it?", "It was the birthday of {friend}."),
        ("Why did {hero} make a present?", "{Hero} made a present for the birthday of {friend}."),
    ),
)

GREEDY = Plot(
    theme="being greedy",
    steps=(
        (
            "There {he} saw a tree full of ripe {fruits}.",
            "{He} found a bush with many sweet {fruits}.",
        ),
        (
            '"They are all mine!" said {hero}.',
            "{Hero} wanted to have every one of them.",
        ),
        (
            '{Friend} asked, "May I have one too?" But {hero} said no.',
            '"Take only what you need," said {friend}, but {hero} did not listen.',
        ),
        (
            "{He} put so many {fruits} into {his} bag that it was full to the top.",
            "{He} filled {his} bag more and more, until it was very heavy.",
        ),
        (
            "On the way home, the bag broke, and all the {fruits} rolled into the river.",
            "Then the bag broke, and all the {fruits} fell into the mud.",
        ),
        (
            "{Hero} had nothing left, and {he} began to cry.",
            "Now {hero} had no {fruits} at all.",
        ),
        (
            "{Friend} was kind and gave {hero} one of {f_his} own.",
            '"I am sorry," said {hero}. {Friend} smiled, and they picked a few new ones together.',
        ),
    ),
    morals=(
        "{Hero} learned that it is better to take a little and share it.",
        "From that day on, {hero} never took more than {he} needed.",
    ),
    questions=(
        ("What did {hero} find?", "{Hero} found many {fruits}."),
        ("What happened to the bag?", "The bag broke."),
        ("Who was kind to {hero}?", "{Friend} was kind to {hero}."),
    ),
    has_thing=False,
)

LONELY = Plot(
    theme="friendship",
    steps=(
        (
            "{Hero} had {a_thing}, but {he} had nobody to play with.",
            "{Hero} played with {his} {thing}, but playing alone was no fun.",
        ),
        (
            "{He} saw {friend} on the other side, but {he} was too shy to say hello.",
            "Not far away sat {friend}, who was alone too.",
        ),
        (
            '"What if {f_he} does not like me?" thought {hero}.',
            "{Hero} opened {his} mouth, but no word came out.",
        ),
        (
            "Then the {thing} rolled away and stopped in front of {friend}.",
            "Then the wind took the {thing} and carried it to {friend}.",
        ),
        (
            '"Is this your {thing}?" asked {friend}. "It is so nice!"',
            "{Friend} picked up the {thing} and brought it back.",
        ),
        (
            '"Do you want to play with me?" asked {hero}. "Yes, please!" said {friend}.',
            "{Hero} smiled and asked if {friend} wanted to play.",
        ),
        (
            "They played until the moon came up.",
            "They ran and laughed all afternoon.",
        ),
    ),
    morals=(
        "{Hero} was never alone again.",
        "{Hero} learned that one small word can start a friendship.",
    ),
    questions=(
        ("What did {hero} play with?", "{Hero} played with {his} {thing}."),
        ("Who brought the {thing} back?", "{Friend} brought the {thing} back."),
        ("Who became the friend of {hero}?", "{Friend} became the friend of {hero}."),
    ),
)

PLOTS = (
    LOST, STUCK, HONEST, SHARING, FEAR, BROKEN, SEED, LEARN, RAIN, BABY, BUILD, GIFT, GREEDY, LONELY,
)  # fmt: skip
FEARS = listed("the dark;deep water;thunder;tall trees;loud noises;the old bridge;big waves", separator=";")
PLANTS = listed("flower;sunflower;rose;apple tree;pumpkin;tulip", separator=";")
SKILLS = listed(
    "swim;sing;dance;climb a tree;whistle;paint;jump over the stream;play the drum;skate", separator=";"
)
SHELTERS = listed("a small barn;a dry cave;an old hut;a little red tent;a hollow tree", separator=";")
BABIES = listed("bird;rabbit;duck;squirrel;mouse;bear;owl;deer", separator=";")
BUILDINGS = listed("sand castle;tree house;little boat;tower;bird house;bridge;snow house", separator=";")
